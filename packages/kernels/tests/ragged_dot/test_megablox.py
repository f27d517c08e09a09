"""The grouped product of the jax wheel, interpreted."""

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.ops import OpCall
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, op_checks
from stack_kernels.ragged_dot.megablox import MEGABLOX, GroupedTiles, megablox

V6E = registries.chips["v6e"]
COVERING = ("empty_groups", "only_rows_of_no_group", "more_rows_in_groups_than_there_are")  # more: test_interpreted.py


def _checks() -> list[object]:
    """A few cases in float32 by default: each check compiles three kernels, operation by operation."""
    return [
        check
        if check.aspect == "float32" and check.case.name in COVERING
        else pytest.param(check, marks=pytest.mark.slow)
        for check in op_checks("ragged_dot")
        if check.aspect != "float16" and "quantized" not in check.case.name
    ]


@pytest.mark.parametrize("check", _checks(), ids=str)
def test_contract(check: OpCheck) -> None:
    with use_chip(V6E):
        check(megablox(interpret=True))


def test_tiles_fit_the_matrices_and_vmem() -> None:
    def default(rows: int, d_in: int, d_out: int, dtype: object = jnp.bfloat16) -> object:
        arrays = {
            "lhs": jax.ShapeDtypeStruct((rows, d_in), dtype),
            "rhs": jax.ShapeDtypeStruct((8, d_in, d_out), dtype),
            "group_sizes": jax.ShapeDtypeStruct((8,), jnp.int32),
            "bias": None,
        }
        assert MEGABLOX.default is not None
        return MEGABLOX.default(OpCall("ragged_dot", arrays, {}), V6E)

    assert default(4096, 2048, 768) == GroupedTiles(256, 1024, 1024)
    assert default(16, 64, 64) == GroupedTiles(128, 128, 128)
    assert default(4096, 2048, 2048, jnp.float32) == GroupedTiles(512, 512, 512)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "v7x:1x1x1"])
@pytest.mark.parametrize(("rows", "d_in", "d_out"), [(4096, 2048, 768), (21, 200, 72)])
def test_value_and_gradients_compile(target: str, rows: int, d_in: int, d_out: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    lhs = jax.ShapeDtypeStruct((rows, d_in), jnp.bfloat16, sharding=sharding)
    rhs = jax.ShapeDtypeStruct((16, d_in, d_out), jnp.bfloat16, sharding=sharding)
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=sharding)

    def total(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(ops.ragged_dot(lhs, rhs, sizes, implementation="megablox").astype(jnp.float32) ** 2)

    with use_target(Target(target)):
        compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(lhs, rhs, sizes).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
