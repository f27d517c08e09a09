"""The example that trains a plain nnx module with Optax: a killed run resumes and ends like one that was not killed."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stack_train.checkpoint import CheckpointDirectory

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_module.py"


@pytest.mark.filterwarnings("ignore:Checkpoint .* is skipped in favor of")  # the kill may interrupt a save
def test_a_plain_module_trains_and_resumes_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines_of_a_run(directory: Path) -> list[str]:
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        runpy.run_path(str(EXAMPLE))
        return capsys.readouterr().out.splitlines()

    assert len(EXAMPLE.read_text().splitlines()) <= 40
    whole = lines_of_a_run(tmp_path / "whole")
    assert float(whole[-1].split()[1]) < 0.5 * float(whole[0].split()[1])
    (tmp_path / "killed").mkdir()
    command = [sys.executable, EXAMPLE]
    with subprocess.Popen(command, cwd=tmp_path / "killed", stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert [killed.stdout.readline().strip() for _ in range(3)] == whole[:3]
        killed.send_signal(signal.SIGKILL)
    saved = CheckpointDirectory(tmp_path / "killed/runs/own-module").steps()[-1]
    resumed = lines_of_a_run(tmp_path / "killed")
    assert resumed[-1] == whole[-1] and len(resumed) == (1000 - saved) // 100 < 10
