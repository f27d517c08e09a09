"""Meshes train alike on the implementations that all packages together bring, not on references alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN_TESTS = Path(__file__).parents[1] / "packages" / "train" / "tests"


@pytest.mark.slow
def test_every_mesh_trains_as_one_device_does(tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-W", "error", TRAIN_TESTS / "steps_on_eight_devices.py", "all"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
