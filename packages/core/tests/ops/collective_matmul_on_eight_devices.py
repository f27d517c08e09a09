"""Checks of `collective_matmul` that need eight devices; `test_on_eight_devices.py` runs them where there are.

The argument `all` adds the rest of the contract to what covers several devices, and further products in bf16.
"""

import dataclasses
import itertools
import sys
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.ops.definitions.collective_matmul import REFERENCE
from stack_core.testing import op_checks

RNG = np.random.default_rng(0)
KINDS = ("all_gather", "reduce_scatter")
ALL = "all" in sys.argv

FEW = (
    "all_gather_plain_over_8-float32",
    "all_gather_plain_over_4-bfloat16",
    "all_gather_odd_sizes_over_2-transformed",
    "all_gather_not_a_number-float32",
    "reduce_scatter_plain_over_8-float32",
    "reduce_scatter_plain_over_4-transformed",
    "reduce_scatter_empty_rows_over_2-float32",
    "reduce_scatter_quantized_over_2-float32",
)
"""The contract's checks without `all`: each kind with two, four and eight devices."""


def the_contract_holds_over_every_number_of_devices_that_divides_eight():
    skipped = set()
    checks = [check for check in op_checks("collective_matmul") if ALL or str(check) in FEW]
    assert ALL or len(checks) == len(FEW)
    for check in checks:
        try:
            check(REFERENCE)
        except unittest.SkipTest:
            skipped.add(check.case.name)
    assert skipped == ({f"{kind}_plain_over_{axis_size}" for kind in KINDS for axis_size in (3, 6)} if ALL else set())


def operands(dtype):
    return jnp.asarray(RNG.normal(size=(4, 8, 16)), dtype), jnp.asarray(RNG.normal(size=(16, 12)), dtype)


def sharded(kind, specs, check_vma=True, implementation=None, axis_name="tensor"):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def product(x, weight):
        return ops.collective_matmul(x, weight, axis_name=axis_name, kind=kind, implementation=implementation)

    return jax.shard_map(product, mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=check_vma)


def assert_like_a_plain_product(product, x, weight, copies=1):
    """Values and gradients; the result holds the columns `copies` times, one after the other."""

    def plain(x, weight):
        return jnp.tile(x.astype(jnp.float32) @ weight.astype(jnp.float32), copies)

    def value_and_gradients(function, x, weight):
        output, vjp = jax.vjp(lambda x, weight: function(x, weight).astype(jnp.float32), x, weight)
        return output, *vjp(jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape))

    actual = jax.jit(lambda *operands: value_and_gradients(product, *operands))(x, weight)
    expected = value_and_gradients(plain, x, weight)
    for a, e in zip(actual, expected, strict=True):
        error = jnp.abs(a.astype(jnp.float32) - e.astype(jnp.float32)).max()
        assert float(error) <= {"float32": 1e-5, "bfloat16": 3e-2}[x.dtype.name] * float(jnp.abs(e).max())


SPECS = {
    "all_gather": (P("data", "tensor", None), P(None, "tensor"), P("data", None, "tensor")),
    "reduce_scatter": (P("data", None, "tensor"), P("tensor", None), P("data", "tensor", None)),
}


def a_second_axis_shares_the_weight():
    other = dataclasses.replace(REFERENCE, name="other", backward=None)
    ways = ((True, None), (False, None), (True, other))
    few = (("float32", "all_gather", ways[1]), ("float32", "reduce_scatter", ways[2]))
    few += tuple(("bfloat16", kind, ways[0]) for kind in KINDS)
    for dtype, kind, (check_vma, implementation) in (
        itertools.product(("float32", "bfloat16"), KINDS, ways) if ALL else few
    ):
        product = sharded(kind, SPECS[kind], check_vma, implementation)
        assert_like_a_plain_product(product, *operands(dtype))


def gathered_rows_meet_a_weight_that_all_devices_share():
    specs = P("data", "tensor", None), P(), P("data", None, "tensor")
    for dtype in ("float32", "bfloat16") if ALL else ("float32",):
        assert_like_a_plain_product(sharded("all_gather", specs), *operands(dtype), copies=4)


def two_axes_are_one():
    specs = P(None, ("data", "tensor"), None), P(None, None), P(None, None, None)
    product = sharded("all_gather", specs, check_vma=False, axis_name=("data", "tensor"))
    x, weight = operands("float32")
    np.testing.assert_allclose(product(x, weight), x @ weight, rtol=1e-5, atol=1e-5)


def the_gradient_gathers_again_and_keeps_no_gathered_rows():
    product = sharded("all_gather", SPECS["all_gather"])
    x, weight = operands("float32")
    _, residuals = jax.eval_shape(lambda x, weight: jax.vjp(product, x, weight), x, weight)
    whole_rows = x.size  # of a device: a half of the batch, gathered over four devices from a quarter of the rows
    assert all(leaf.size <= whole_rows for leaf in jax.tree.leaves(residuals))


if __name__ == "__main__":
    for check in [value for value in globals().values() if getattr(value, "__module__", None) == __name__]:
        if not check.__code__.co_argcount:
            check()
