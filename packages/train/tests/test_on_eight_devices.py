"""Runs the scripts that need eight devices, together in one process, because starting one takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The last ones change constants of the ops, and replace their implementations.
SCRIPTS = (
    "step/replicas",
    "step/qk_clip",
    "nn/pipeline",
    "nn/experts",
    "nn/indexer",
    "models/encoder_decoder",
    "contrastive/contrastive",
    "nn/context",
    "nn/opaque",
)
# Each script of the command line runs as if it were started alone.
RUN = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[2:]]"


@pytest.mark.parametrize(
    ("checks", "scripts"),
    [
        ("few", SCRIPTS),
        *(pytest.param("all", (script,), marks=pytest.mark.slow) for script in SCRIPTS),
    ],
)
def test_on_eight_devices(checks, scripts):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    paths = [Path(__file__).parent / f"{script}_on_eight_devices.py" for script in scripts]
    subprocess.run([sys.executable, "-W", "error", "-c", RUN, checks, *paths], check=True, env=environment)
