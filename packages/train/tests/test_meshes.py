"""Training on eight devices: the losses of one, parameters where their rules put them, runs that change their mesh."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


@pytest.fixture
def on_eight_devices(tmp_path):
    """Runs a script of this folder in a process that has eight devices, and returns what it printed."""

    def run(script, *arguments):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-W", "error", str(HERE / script), *map(str, arguments)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize("meshes", [(), pytest.param(("all",), marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_mesh_trains_as_one_device_does(on_eight_devices, meshes):
    printed = on_eight_devices("steps_on_eight_devices.py", *meshes)
    # XLA's warning that it found no way from one sharding to another but to gather the whole array on every device.
    assert "rematerialization" not in printed


@pytest.mark.slow
def test_denoisers_and_an_autoencoder_train_as_on_one_device(on_eight_devices):
    on_eight_devices("diffusion/steps_on_eight_devices.py")


@pytest.mark.parametrize("more", [(), pytest.param(("all",), marks=pytest.mark.slow)], ids=["few", "all"])
def test_runs_resume_on_other_meshes_and_refuse_what_does_not_divide(on_eight_devices, tmp_path, more):
    texts = tmp_path / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "return", "yield", "(x)", "\n"]
    for number in range(20):
        (texts / f"{number}.txt").write_text(" ".join(rng.choice(words, 200)))
    on_eight_devices("runs_on_eight_devices.py", tmp_path, texts / "*.txt", *more)
