"""Calls whose implementation XLA cannot split, on eight devices, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path


def test_on_eight_devices() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("calls_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script], check=True, env=environment)
