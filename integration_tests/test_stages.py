"""Runs of several packages in pipeline stages equal runs on one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FEW = ("qat", "dpo")
MORE = ("codes", "qt", "floats", "dora", "nf4", "experts", "kto", "reward_model")
SLOW = [pytest.param(cases, marks=pytest.mark.slow) for cases in (MORE, ("resume",))]


@pytest.mark.parametrize("cases", [FEW, *SLOW], ids=["few", "more", "resume"])
def test_stages_train_as_one_device_does(cases, tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-W", "error", Path(__file__).with_name("stages_on_eight_devices.py"), tmp_path, *cases]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
