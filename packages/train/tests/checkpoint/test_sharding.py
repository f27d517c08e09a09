import os
import subprocess
import sys
from pathlib import Path


def test_digests_and_checkpoints_do_not_depend_on_the_sharding(tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    child = [sys.executable, "-W", "error", str(Path(__file__).with_name("sharding_child.py")), str(tmp_path)]
    result = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
