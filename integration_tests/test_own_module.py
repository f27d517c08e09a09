"""The example that trains a plain nnx module with Optax: a killed run resumes and ends like one that was not killed."""

import signal
import subprocess
import sys
from pathlib import Path

from stack_train.checkpoint import CheckpointDirectory

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_module.py"


def start(directory):
    directory.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, EXAMPLE], cwd=directory, stdout=subprocess.PIPE, text=True)


def test_a_plain_module_trains_and_resumes_after_a_kill(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    whole = start(tmp_path / "whole").communicate()[0].splitlines()
    assert float(whole[-1].split()[1]) < 0.5 * float(whole[0].split()[1])
    with start(tmp_path / "killed") as killed:
        assert [killed.stdout.readline().strip() for _ in range(3)] == whole[:3]
        killed.send_signal(signal.SIGKILL)
    saved = CheckpointDirectory(tmp_path / "killed/runs/own-module").steps()[-1]
    resumed = start(tmp_path / "killed").communicate()[0].splitlines()
    assert resumed[-1] == whole[-1] and len(resumed) == (1000 - saved) // 100 < 10
