"""What the reference of `ragged_dot` promises beyond its contract: work, memory, and rows that belong to no group."""

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.definitions.ragged_dot import REFERENCE
from stack_core.ops.references.ragged_tiles import cut_off
from stack_core.testing import OpCheck, Quantized, op_checks

RNG = np.random.default_rng(0)
LHS = jnp.asarray(RNG.normal(size=(9, 4)), jnp.float32)
RHS = jnp.asarray(RNG.normal(size=(3, 4, 5)), jnp.float32)
TILES = importlib.import_module("stack_core.ops.references.ragged_tiles")


def _gradients(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    weights = jnp.arange(1, 6, dtype=jnp.float32)
    return jax.grad(lambda lhs, rhs: jnp.sum(ops.ragged_dot(lhs, rhs, group_sizes) * weights), argnums=(0, 1))(lhs, rhs)


FEW = (
    ("odd_sizes", 1),
    ("odd_sizes", 1024),
    ("rows_of_no_group", 1),
    ("more_rows_in_groups_than_there_are", 1024),
    ("quantized_by_tile", 1),
    ("bias", 1024),
)


@pytest.mark.parametrize(
    ("check", "tile_rows"),
    [
        pytest.param(check, rows, marks=() if (check.case.name, rows) in FEW else pytest.mark.slow)
        for check in op_checks("ragged_dot")
        for rows in (1, 1024)
        if check.aspect == "float32" and check.case.name != "empty_rows"
    ],
    ids=str,
)
def test_tiles_of_any_size(check: OpCheck, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TILES, "_tile_rows", lambda rows, groups: tile_rows)
    check(REFERENCE)


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_rows_of_no_group_may_hold_anything(garbage: float) -> None:
    group_sizes = jnp.array([2, 0, 4])
    output, vjp = jax.vjp(lambda lhs, rhs: ops.ragged_dot(lhs, rhs, group_sizes), LHS.at[6:].set(garbage), RHS)
    np.testing.assert_array_equal(output[6:], 0)
    cotangent = jnp.ones_like(output)
    expected = jax.vjp(lambda lhs, rhs: ops.ragged_dot(lhs, rhs, group_sizes), LHS, RHS)[1](cotangent)
    of_lhs, of_rhs = vjp(cotangent.at[6:].set(garbage))
    np.testing.assert_array_equal(of_lhs[6:], 0)
    np.testing.assert_array_equal(of_lhs, expected[0])
    np.testing.assert_array_equal(of_rhs, expected[1])


def test_what_exceeds_the_rows_iscut_off() -> None:
    cut, whole = jnp.array([4, 20, 3]), jnp.array([4, 5, 0])
    np.testing.assert_array_equal(ops.ragged_dot(LHS, RHS, cut), ops.ragged_dot(LHS, RHS, whole))
    for actual, expected in zip(_gradients(LHS, RHS, cut), _gradients(LHS, RHS, whole), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_sizes_whose_sum_overflows_arecut_off() -> None:
    rows, most = 2**30, 2**31 - 1
    sizes = cut_off(jnp.array([3, most, 0, most, 5, -1, most]), rows)
    np.testing.assert_array_equal(sizes, [3, rows - 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(cut_off(jnp.array([-2, 7, 0, 9]), rows), [0, 7, 0, 9])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_any_integers_are_group_sizes(dtype: str) -> None:
    sizes = jnp.array([3, 1, 2])
    np.testing.assert_array_equal(ops.ragged_dot(LHS, RHS, sizes.astype(dtype)), ops.ragged_dot(LHS, RHS, sizes))


@pytest.mark.parametrize("scale_shape", [(3, 1, 6), (3, 2, 3), (1, 4, 6)])
def test_the_scale_of_a_quantized_operand_has_a_gradient(scale_shape: tuple[int, ...]) -> None:
    values = jnp.asarray(RNG.integers(-100, 101, size=(3, 4, 6)), jnp.int8)
    scales = jnp.asarray(RNG.uniform(0.01, 0.02, size=scale_shape), jnp.float32)
    group_sizes = jnp.array([5, 0, 3])

    def total(lhs: Any, scales: Any, prepare: Any) -> Any:
        return jnp.sum(jnp.sin(ops.ragged_dot(lhs, prepare(Quantized(values, scales)), group_sizes)))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)
    actual = gradient(LHS, scales, lambda rhs: rhs)
    expected = gradient(LHS, scales, lambda rhs: ops.dequantize(rhs, jnp.float32))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr; after one that calls other jaxprs come theirs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _equations(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def test_a_tile_computes_no_more_than_its_rows_and_its_group() -> None:
    rows, d_in, d_out, groups = 256, 24, 40, 16
    operands = jnp.ones((rows, d_in)), jnp.ones((groups, d_in, d_out)), jnp.full(groups, 16)

    def total(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return jnp.sum(ops.ragged_dot(lhs, rhs, group_sizes, implementation="reference"))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(*operands)
    loops = [equation for equation in _equations(jaxpr) if equation.primitive.name == "scan"]
    assert len(loops) == 3  # the product, and a gradient for each operand
    whole = min(rows * d_in, rows * d_out, groups * d_in * d_out)
    for equation in (equation for loop in loops for equation in _equations(loop.params["jaxpr"])):
        in_place = equation.primitive.name == "dynamic_update_slice"
        if not in_place and not any(map(_is_jaxpr, equation.params.values())):
            assert all(result.aval.size < whole for result in equation.outvars), equation


def test_memory_does_not_grow_with_the_product_of_rows_and_groups() -> None:
    rows, width, groups = 1024, 64, 64
    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, width), (groups, width, width))]
    sizes = jax.ShapeDtypeStruct((groups,), "int32")

    def total(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return jnp.sum(ops.ragged_dot(lhs, rhs, group_sizes) ** 2)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*operands, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < groups * rows * width * 4 / 4
