"""Every optimizer learns, and resumes bitwise after its process was killed, on one device and on fsdp x tensor."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stack_core.abi.plugins import registries

SCRIPT = Path(__file__).parent / "optimizers_on_devices.py"


@pytest.fixture
def process():
    """Trains in a process of its own that sees so many devices; returns what it printed, or None if it was killed."""

    def run(directory, devices, names, steps, kill_after_steps=0):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        command = [sys.executable, "-W", "error", SCRIPT, directory, steps, kill_after_steps, devices, *names]
        done = subprocess.run([*map(str, command)], env=environment, check=False, capture_output=True, text=True)
        if kill_after_steps:
            assert done.returncode == -signal.SIGKILL, done.stderr
            return None
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


ALL = tuple(registries.optimizers.names())


@pytest.mark.parametrize(
    ("devices", "names", "steps", "kill_after_steps"),
    [
        (4, ("adafactor", "muon"), 40, 0),
        pytest.param(1, ALL, 100, 60, marks=pytest.mark.slow),
        pytest.param(8, ALL, 100, 60, marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_resumes_bitwise(process, tmp_path, devices, names, steps, kill_after_steps):
    """A whole run resumes from its own checkpoint, too."""
    whole = process(tmp_path / "whole", devices, names, steps)
    for name in names:
        assert whole[name]["loss"] < 0.9 * whole[name]["unigram_entropy"], name
        assert whole[name]["resumed"] == whole[name]["digests"], name
    if kill_after_steps:
        process(tmp_path / "killed", devices, names, steps, kill_after_steps)
        assert process(tmp_path / "killed", devices, names, steps) == whole
