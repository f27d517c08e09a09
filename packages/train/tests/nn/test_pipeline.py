"""Layers in stages: the gradients of one device, the share of work, what is kept, and what cannot be staged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("meshes", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_stages_train_as_one_device_does(meshes):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("pipeline_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, meshes], check=True, env=environment)
