import os
import subprocess
import sys
from pathlib import Path


def test_every_implementation_gives_on_eight_devices_what_it_gives_on_one() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = Path(__file__).with_name("ops_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script], check=True, env=environment)
