import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("calls", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_every_implementation_gives_on_eight_devices_what_it_gives_on_one(calls: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("ops_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, calls], check=True, env=environment)
