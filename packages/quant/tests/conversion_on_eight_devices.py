"""Sharded arrays stay sharded, and give what one device gives; `test_conversion.py` runs this in its own process.

The argument `all` runs every spec with every combination of blocks, kinds of axes and layouts; without it, every spec
runs in one block, and every second one in small blocks too.
"""

import itertools
import os
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stack_quant import ArraySpec, blocks, dequantize, fake_quantize, quantize_array

SPECS = (
    ArraySpec(channel_axes=(0, 2)),
    ArraySpec(channel_axes=(0,), calibration="percentile,99"),
    ArraySpec(type="int4", channel_axes=(0, 2), tiles={1: 32}, calibration="mse"),
    ArraySpec(type="int3", channel_axes=(0, 2), tiles={1: 128}),
    ArraySpec(type="nvfp4", channel_axes=(0, 2), tiles={1: 16}),
    ArraySpec(type="nf4", channel_axes=(0, 2), tiles={1: 64}, double_quantized=True),
)
LAYOUTS = (P(None, "fsdp", "tensor"), P(None, "tensor", None), P(None, ("fsdp", "tensor"), None))

EVERY = tuple(itertools.product((AxisType.Auto, AxisType.Explicit), LAYOUTS))
FEW = {
    2**20: ((AxisType.Auto, LAYOUTS[1]), (AxisType.Explicit, LAYOUTS[0])),
    2**10: ((AxisType.Explicit, LAYOUTS[2]),),
}


def main() -> None:
    values = np.random.default_rng(0).normal(size=(3, 256, 64)).astype(np.float32)
    for fewest_entries in (2**20, 2**10):
        blocks._FEWEST_ENTRIES = fewest_entries
        every = "all" in sys.argv
        for place, (axis_type, layout) in enumerate(EVERY if every else FEW[fewest_entries]):
            mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
            sharding = NamedSharding(mesh, layout)
            x = jax.device_put(values, sharding)
            for spec in SPECS if every else SPECS[place::2]:
                alone = quantize_array(jnp.asarray(values), spec)
                found = quantize_array(x, spec)
                compare(found, alone, sharding)
                with jax.set_mesh(mesh):
                    np.testing.assert_array_equal(dequantize(found), dequantize(alone))
                    if axis_type == AxisType.Explicit:
                        compare(quantize_array(x, spec), alone, sharding)


def in_traced_programs() -> None:
    """On a mesh as `jax.make_mesh` makes it, whose axes are Explicit; nf4 has codes, scales and tables to spread."""
    values = np.random.default_rng(0).normal(size=(3, 256, 64)).astype(np.float32)
    spec = ArraySpec(type="nf4", channel_axes=(0, 2), tiles={1: 64}, double_quantized=True)
    alone = quantize_array(jnp.asarray(values), spec)
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):
        x = jax.device_put(values, P(None, "fsdp", None))  # shards of half a tile
        found = jax.jit(quantize_array, static_argnames="spec")(x, spec=spec)
        compare(found, alone, x.sharding)
        gradient = jax.grad(lambda x: jnp.sum(fake_quantize(x, spec) * x))(x)
        assert gradient.sharding == x.sharding
        np.testing.assert_allclose(gradient, dequantize(alone) + x, rtol=1e-5, atol=1e-6)


def compare(found, expected, sharding) -> None:
    assert found.planes[0].sharding == sharding, (found.planes[0].sharding, sharding)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one).astype(float), np.asarray(other).astype(float))
    shard = found.planes[0].addressable_shards[0].data
    assert shard.size < found.size


if __name__ == "__main__":
    main()
    in_traced_programs()
