"""Sequences that devices share: the gradients of one device, and what cannot be shared."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from stack_train.nn.context import check_unsplit_sequence, to_zigzag


@pytest.mark.parametrize("meshes", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_shared_sequences_train_as_whole_ones_do(meshes):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("context_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, meshes], check=True, env=environment)


def test_one_device_keeps_the_order():
    tokens = jnp.arange(6).reshape(2, 3)
    assert to_zigzag(tokens) is tokens
    check_unsplit_sequence("A gated delta rule")
