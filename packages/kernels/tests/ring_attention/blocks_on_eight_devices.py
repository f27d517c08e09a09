"""`ring_attention/blocks` with the interpreted splash kernel; `test_blocks.py` runs this with eight devices.

The argument `all` adds the contract.
"""

import sys
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import op_checks
from stack_kernels.ring_attention.blocks import blocks

INTERPRETED = blocks(interpret=True)


def a_ring_with_every_option_equals_one_device(devices):
    """Packed segments, a window that ends within a block, grouped heads, narrow values, sinks."""
    rng, seq = np.random.default_rng(0), 16 * devices
    shapes = {"query": (2, seq, 4, 12), "key": (2, seq, 2, 12), "value": (2, seq, 2, 8), "sinks": (4,)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    # A segment over several devices, one that ends where a block ends, one of a single token, and padding.
    lengths = (5, seq - 12, 4, 3), (8, 1, 15, seq - 24)
    segments = np.stack([np.repeat([1, 2, 3, 0], lengths[0]), np.repeat([4, 5, 6, 7], lengths[1])])
    weights = jnp.asarray(rng.normal(size=(2, seq, 4, 8)), jnp.float32)
    parts = np.split(np.arange(seq), 2 * devices)
    order = np.concatenate([parts[place] for device in range(devices) for place in (device, 2 * devices - 1 - device)])
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",), axis_types=(AxisType.Auto,))
    options = {"causal": True, "window": (13, None), "softcap": 3.0}
    split = P(None, "context")

    def on_one(arrays):
        return ops.attention(**arrays, segment_ids=jnp.asarray(segments), implementation="reference", **options)

    def on_ring(arrays):
        def local(arrays, segment_ids):
            packed = ops.PackedSegments.of(segment_ids)
            return ops.ring_attention(
                **arrays, segment_ids=packed, axis_name="context", implementation=INTERPRETED, **options
            )

        specs = {name: P() if name == "sinks" else split for name in arrays}
        spread = {name: x if name == "sinks" else x[:, order] for name, x in arrays.items()}
        found = jax.shard_map(local, mesh=mesh, in_specs=(specs, split), out_specs=split)(spread, segments[:, order])
        return found[:, np.argsort(order)]

    def with_gradients(function):
        found, vjp = jax.vjp(function, arrays)
        return found, vjp(weights)

    expected = jax.jit(lambda: with_gradients(on_one))()
    with use_chip(registries.chips["v6e"]):
        (call,) = ops.explain(lambda arrays: with_gradients(on_ring), arrays)
        assert call.forward.implementation is call.backward.implementation is INTERPRETED, call
        found = jax.jit(lambda: with_gradients(on_ring))()
    for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max())


def the_contract_holds():
    skipped = set()
    for check in op_checks("ring_attention"):
        # An offset per row is refused, as a kernel's must be known while tracing.
        if check.aspect == "float16" or check.case.name in ("offset_per_row_over_2", "everything_over_4"):
            continue
        try:
            with use_chip(registries.chips["v6e"]):
                check(INTERPRETED)
        except unittest.SkipTest:
            skipped.add(check.case.name)
    assert skipped == {"contiguous_over_3"}, skipped


if __name__ == "__main__":
    a_ring_with_every_option_equals_one_device(2)
    if "all" in sys.argv:
        a_ring_with_every_option_equals_one_device(4)
        the_contract_holds()
