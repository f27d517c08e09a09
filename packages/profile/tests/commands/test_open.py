"""`stack profile open` serves a run's reports on loopback to who knows the address, until Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from stack_core.cli import main
from stack_profile.analyses.ops import ops
from stack_profile.report import served
from stack_profile.report.served import ReportServer
from stack_profile.traces.trace import capture_folders


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


def ask(server, path=""):
    """The status and the text of an answer, without a socket."""
    return server.answer(urlsplit(server.address).path + path)


@pytest.fixture
def server(request):
    """Listens for reports of a directory or file."""

    def start(path, **settings):
        server = ReportServer(path, **settings)
        request.addfinalizer(server.close)
        return server

    return start


def test_an_address_without_the_token_has_nothing(server, run_directory):
    server = server(run_directory)
    token = server.address.rstrip("/").rpartition("/")[2]
    for path in ("/", f"/{token[:-1]}/", "/captures/later", "/%2e%2e/"):
        status, text = server.answer(path)
        assert status == 404 and "later" not in text
    for name in ("captures/missing", "captures/../../../../etc/passwd", "captures/"):
        assert ask(server, name)[0] == 404


def test_one_capture_is_shown_at_once(server, captured):
    (file,) = captured.rglob("*.xplane.pb")
    for place in (captured, file.parent, file):
        opened = server(place, limit=3)
        status, target = ask(opened)
        assert status == 302 and [target] == list(opened.captures())
    status, text = ask(opened, target)
    assert status == 200 and "Profile of" in text


def test_a_browser_is_opened_whose_arguments_do_not_have_the_token(opened, captured, tmp_path):
    program, seen = tmp_path / "browser.sh", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    program.chmod(0o755)
    process, about = opened(captured, BROWSER=str(program))
    with urllib.request.urlopen(about["address"], timeout=60) as answer:
        assert answer.url == about["captures"][0]["address"] and b"Profile of" in answer.read()
    file = Path(url2pathname(urlsplit(seen.read_text().strip()).path))
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"url={about['address']}" in file.read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and not file.exists()


def test_a_capture_that_is_deleted_meanwhile_leaves_the_list(server, run_directory, monkeypatch):
    folder = run_directory / "profile" / "plugins" / "profile"
    (folder / "gone").mkdir()
    (folder / "gone" / "host.xplane.pb").symlink_to("nothing")  # listed, and cannot be read
    monkeypatch.setattr(served, "capture_folders", lambda path: (folder / "empty", *capture_folders(path)))
    (folder / "empty").mkdir()
    server = server(run_directory)
    empty, gone = (next(each for each in server.captures() if each.endswith(name)) for name in ("empty", "gone"))
    status, listing = ask(server)
    assert status == 200 and ">later<" in listing and ">empty<" not in listing and ">gone<" not in listing
    for name in (empty, gone):
        status, text = ask(server, name)
        assert status == 500 and "was deleted while it was read" in text


def test_mistakes_are_named(capsys, server, captured, tmp_path):
    assert "does not exist" in refused(capsys, tmp_path / "runs" / "nothing")
    assert "holds no *.xplane.pb" in refused(capsys, tmp_path)
    port = server(captured).address.split(":")[2].partition("/")[0]
    assert f"Cannot listen on port {port}" in refused(capsys, captured, "--port", port)
