"""Checks of `exchange` that need eight devices; `test_on_eight_devices.py` runs them where there are.

The argument `all` adds the rest of the contract to what covers two and eight devices.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.ops.definitions.exchange import REFERENCE
from stack_core.testing import op_checks

EXPERTS, ROWS, WIDTH = 8, 6, 4
ALL = "all" in sys.argv
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


FEW = (
    "send_all_over_2-transformed",
    "send_cut_off_over_8-float32",
    "send_empty_rows_over_2-float32",
    "send_more_in_groups_than_rows_over_2-float32",
    "return_all_over_8-float16",
    "return_cut_off_over_2-transformed",
    "return_rows_of_no_group_over_2-float32",
    "return_more_in_groups_than_rows_over_2-float32",
)
"""The contract's checks without `all`: each kind, and each relation of rows to groups, over two or eight devices."""


def the_contract_holds():
    checks = [check for check in op_checks("exchange") if check.aspect != "bfloat16" and (ALL or str(check) in FEW)]
    assert ALL or len(checks) == len(FEW)
    for check in checks:
        check(REFERENCE)


def mixture(x, expert, weights, out_rows, axis_name):
    """Each row times its expert's matrix, which one device of the axis keeps; and how many rows were cut off."""
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=EXPERTS)
    received = ops.exchange(x[order], sizes, axis_name=axis_name, out_rows=out_rows)
    own_sizes, dropped = ops.received_sizes(sizes, axis_name=axis_name, out_rows=out_rows)
    products = ops.ragged_dot(received, weights, own_sizes)
    returned = ops.exchange(products, sizes, axis_name=axis_name, out_rows=len(x), kind="return")
    return jnp.zeros_like(returned).at[order].set(returned), dropped[None]


def sharded(out_rows, axis_name, check_vma=True):
    rows = P(("data", "expert"))
    return jax.shard_map(
        lambda *operands: mixture(*operands, out_rows, axis_name),
        mesh=MESH,
        in_specs=(rows, rows, P(axis_name)),
        out_specs=(rows, rows),
        check_vma=check_vma,
    )


def operands():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8 * ROWS, WIDTH)), jnp.float32)
    return (
        x,
        jnp.asarray(rng.integers(0, EXPERTS, 8 * ROWS)),
        jnp.asarray(rng.normal(size=(EXPERTS, WIDTH, 5)), x.dtype),
    )


def a_mixture_of_experts_is_that_of_one_device_in_value_and_gradient():
    x, expert, weights = operands()

    def value_and_gradients(product):
        output, vjp = jax.vjp(product, x, weights)
        return output, *vjp(jnp.cos(jnp.arange(output.size, dtype=x.dtype)).reshape(output.shape))

    expected = value_and_gradients(lambda x, weights: jnp.einsum("rk,rkn->rn", x, weights[expert]))
    for axis_name in ("expert", ("data", "expert")):
        devices = 4 if axis_name == "expert" else 8
        for check_vma in (True, False) if ALL else (devices == 8,):
            product = sharded(devices * ROWS, axis_name, check_vma)
            actual = jax.jit(lambda p=product: value_and_gradients(lambda x, weights: p(x, expert, weights)[0]))()
            for a, e in zip(actual, expected, strict=True):
                np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def rows_that_the_buffer_has_no_room_for_are_counted_and_return_as_zeros():
    x, expert, weights = operands()
    output, dropped = sharded(ROWS, "expert")(x, expert, weights)
    received = [
        int(np.sum(np.asarray(expert).reshape(2, -1)[row] // (EXPERTS // 4) == column))
        for row in range(2)
        for column in range(4)
    ]
    assert dropped.tolist() == [max(count - ROWS, 0) for count in received] and sum(dropped.tolist()) > 0
    exact = jnp.einsum("rk,rkn->rn", x, weights[expert])
    is_zero = np.asarray(jnp.all(output == 0, axis=1))
    assert is_zero.sum() == sum(dropped.tolist())
    np.testing.assert_allclose(output[~is_zero], exact[~is_zero], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    for check in [value for value in globals().values() if getattr(value, "__module__", None) == __name__]:
        if not check.__code__.co_argcount:
            check()
