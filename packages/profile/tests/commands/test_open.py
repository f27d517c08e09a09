"""`stack profile open` serves a run's reports on loopback to who knows the address, until Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from stack_core.cli import main
from stack_profile.analyses.ops import ops


@pytest.fixture
def run_directory(captured, tmp_path):
    """A run with two captures, of which `later` is the newest, and a damaged one."""
    (capture,) = (captured / "plugins" / "profile").iterdir()
    folder = tmp_path / "run" / "profile" / "plugins" / "profile"
    for number, name in enumerate(("damaged", "first one", "later")):
        shutil.copytree(capture, folder / name)
        os.utime(folder / name, (number, number))
    for file in (folder / "damaged").glob("*.xplane.pb"):
        file.write_bytes(b"HloModule")
    os.utime(folder / "damaged", (0, 0))
    return tmp_path / "run"


@pytest.fixture
def opened(tmp_path):
    """Starts the command with options, and returns its process and its printed JSON."""
    processes = []

    def start(*tokens, **environment):
        command = [sys.executable, "-m", "stack_core", "profile", "open", *map(str, tokens), "--json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            text += line
        return process, json.loads(text)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def fetch(address):
    """The status and the text of an answer."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def page_at(address):
    return SimpleNamespace(as_uri=lambda: address)


def refused(capsys, *tokens):
    with pytest.raises(SystemExit) as end:
        main(["profile", "open", *map(str, tokens)])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_browser_reads_the_reports_of_a_run_until_ctrl_c(browser, opened, run_directory, trace):
    process, about = opened(run_directory, "--no-browser")
    assert [each["name"] for each in about["captures"]] == ["later", "first one", "damaged"]
    status, listing = fetch(about["address"])
    assert status == 200 and listing.index("later") < listing.index("first one")
    browser.call("Page.navigate", url=about["address"])
    browser.wait_for("document.title.startsWith('Captures of')")
    browser.evaluate("document.querySelectorAll('td a')[1].click()")
    browser.wait_for("document.querySelector('#instrument')?.dataset.ready")
    assert browser.evaluate("decodeURIComponent(location.pathname)").endswith("/first one")
    assert browser.evaluate("document.querySelectorAll('#ops tbody tr').length") == len(ops(trace).rows)
    browser.open(page_at(about["captures"][0]["address"]), "#tab=memory")
    assert browser.rows() and not [text for text in browser.complaints if "favicon" not in str(text)]
    status, text = fetch(about["captures"][2]["address"])
    assert status == 500 and "the text of a program" in text
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and process.stderr.read() == ""
    with pytest.raises(urllib.error.URLError):
        fetch(about["address"])


def test_an_address_without_the_token_has_nothing(opened, run_directory):
    _, about = opened(run_directory, "--no-browser")
    host, token = about["address"].rstrip("/").rsplit("/", 1)
    assert host.startswith("http://127.0.0.1:")
    for path in ("/", f"/{token[:-1]}/", "/captures/later", "/%2e%2e/"):
        status, text = fetch(host + path)
        assert status == 404 and "later" not in text
    for name in ("captures/missing", "captures/../../../../etc/passwd", "captures/"):
        assert fetch(about["address"] + name)[0] == 404


def test_one_capture_is_shown_at_once_and_the_browser_opened(opened, captured, tmp_path):
    program, seen = tmp_path / "browser.sh", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    program.chmod(0o755)
    (file,) = captured.rglob("*.xplane.pb")
    for place in (captured, file.parent, file):
        _, about = opened(place, "--limit", 3, BROWSER=str(program))
        with urllib.request.urlopen(about["address"], timeout=60) as answer:
            assert answer.url == about["captures"][0]["address"] and b"Profile of" in answer.read()
        assert seen.read_text().strip() == about["address"]


def test_mistakes_are_named(capsys, opened, captured, tmp_path):
    assert "does not exist" in refused(capsys, tmp_path / "runs" / "nothing")
    assert "holds no *.xplane.pb" in refused(capsys, tmp_path)
    _, about = opened(captured, "--no-browser")
    port = about["address"].split(":")[2].partition("/")[0]
    assert f"Cannot listen on port {port}" in refused(capsys, captured, "--port", port)
