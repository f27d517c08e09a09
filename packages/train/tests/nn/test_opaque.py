"""Layers on implementations that XLA cannot split, in a process that has eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("what", ["trace", pytest.param("compare", marks=pytest.mark.slow)])
def test_each_device_runs_the_ops_of_layers_on_its_part(what):
    """The calls have the shapes of parts; losses and gradients are those of one device."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("opaque_on_eight_devices.py")
    done = subprocess.run([sys.executable, script, what], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
