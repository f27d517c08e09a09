"""Sequences on one device, which shares them with none; `context_on_eight_devices.py` has meshes."""

import jax.numpy as jnp

from stack_train.nn.context import check_unsplit_sequence, to_zigzag


def test_one_device_keeps_the_order():
    tokens = jnp.arange(6).reshape(2, 3)
    assert to_zigzag(tokens) is tokens
    check_unsplit_sequence("A gated delta rule")
