"""Whatever moment a process is killed at, the checkpoints that can be seen are whole."""

import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from stack_train.checkpoint import CheckpointStore

from .conftest import bits
from .saving_child import state_at


def save_until_killed(directory: Path, delay_s: float) -> int:
    """Returns the last step that the child knew to be on disk."""
    command = [sys.executable, str(Path(__file__).with_name("saving_child.py")), str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        acknowledged = [first, *child.stdout.read().splitlines()]
    assert child.returncode == -signal.SIGKILL, "the child ended by itself"
    return int(acknowledged[-1])


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_kill_leaves_only_whole_checkpoints(tmp_path: Path, kills: int) -> None:
    choose = random.Random(kills)
    for _ in range(kills):
        acknowledged = save_until_killed(tmp_path, choose.uniform(0.0, 0.5))
        with CheckpointStore(tmp_path) as store:
            assert store.latest() >= acknowledged
            for step in store.steps():
                restored = store.restore(state_at(0), step)
                assert bits(restored.state) == bits(state_at(step))
                assert (restored.data_state, restored.config_yaml) == ({"step": step}, f"step: {step}\n")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*its saving was interrupted")
                assert store.restore(state_at(0)).step == store.latest()
