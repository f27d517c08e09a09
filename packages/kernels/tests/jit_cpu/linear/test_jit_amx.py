import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.programs.flops import Flops, count_flops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.jit_amx import JIT_AMX, TILED

_SIZES = ((32, 32), (96, 160), (1600, 544))  # a tile; less than a unit; panels and units that are not filled
_ROWS = (1, 7, 16, 31, 100, 530)


@pytest.fixture(autouse=True)
def tiles() -> None:
    found = host.this_processor()
    if found is None or not found.has_tiles:
        pytest.skip("this processor has no AMX")


@pytest.mark.parametrize("check", [check for check in op_checks("linear") if check.aspect == "bfloat16"], ids=str)
def test_contract(check: OpCheck) -> None:
    check(JIT_AMX)


@pytest.mark.covering
@pytest.mark.parametrize("sizes", _SIZES)
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_any_number_of_rows_are_exact_to_fp32(dtype: str, rows: int, sizes: tuple[int, int]) -> None:
    depth, columns = sizes
    x, weight, back = _bf16((rows, depth), sizes, (rows, columns))
    _assert_near(TILED.times(x, weight, dtype), _exact(x) @ _exact(weight))
    _assert_near(TILED.row_gradient(back, weight, dtype), _exact(back) @ _exact(weight).T)
    _assert_near(TILED.weight_gradient(x.T, back, dtype), _exact(x).T @ _exact(back))


@pytest.mark.parametrize("rows", [7, 120, 250])
def test_few_rows_by_a_wide_weight(rows: int) -> None:
    """Units are the wider the fewer rows there are; those of few processors, for each has two at least."""
    x, weight = _bf16((rows, 160), (160, 8256))
    _assert_near(TILED.times(x, weight, jnp.float32), _exact(x) @ _exact(weight))
    _assert_near(TILED.row_gradient(x, weight.T, jnp.float32), _exact(x) @ _exact(weight))


def test_units_that_run_at_once_are_all_there() -> None:
    """As many as processors want, again and again, into the same buffers."""
    x, *weights = _bf16((64, 64), *[(64, 2048)] * 4)

    @jax.jit
    def products(x: Any) -> list[Any]:
        return [TILED.times(x, weight, jnp.float32) for weight in weights]

    expected = [_exact(x) @ _exact(weight) for weight in weights]
    for _ in range(100):
        for found, exact in zip(products(x), expected, strict=True):
            _assert_near(found, exact)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = _bf16((40, 64), (64, 64))
    found = np.asarray(TILED.times(x.at[39, 3].set(jnp.nan), weight, jnp.float32))
    assert np.isnan(found[39]).all()
    _assert_near(found[:39], _exact(x[:39]) @ _exact(weight))


def test_gradients_and_bias_are_those_of_the_reference() -> None:
    x, weight, bias = _bf16((2, 21, 64), (64, 96), (96,))

    def loss(implementation: Any, *arrays: Any) -> jax.Array:
        product = ops.linear(*arrays[:2], bias=arrays[2], preferred_dtype=jnp.float32, implementation=implementation)
        return jnp.sum(jnp.sin(product))

    found, expected = (
        jax.jit(jax.grad(lambda *arrays, how=how: loss(how, *arrays), argnums=(0, 1, 2)))(x, weight, bias)
        for how in (JIT_AMX, "reference")
    )
    for gradient, exact in zip(found, expected, strict=True):
        _assert_near(gradient, _exact(exact))


@pytest.mark.parametrize(
    ("rows", "weight", "dtype", "reason"),
    [
        (6, (32, 32), "bfloat16", "7 rows or more, and x has 6"),
        (7, (32, 48), "bfloat16", "sizes that 32 divides"),
        (7, (32, 32), "float32", "for bf16"),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_reason(
    rows: int, weight: tuple[int, int], dtype: str, reason: str
) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        ops.linear(jnp.zeros((rows, weight[0]), dtype), jnp.zeros(weight, dtype), implementation=JIT_AMX)


@pytest.mark.parametrize(("rows", "name"), [(6, "jit_x86"), (7, "jit_amx"), (65, "jit_amx")])
def test_it_is_chosen_where_it_is_sooner(rows: int, name: str) -> None:
    (decision,) = ops.explain(ops.linear, jnp.zeros((rows, 32), jnp.bfloat16), jnp.zeros((32, 32), jnp.bfloat16))
    assert decision.forward.implementation.name == name


def test_without_tile_registers_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.this_processor()
    assert found is not None
    monkeypatch.setattr(host, "this_processor", lambda: dataclasses.replace(found, has_tiles=False))
    with pytest.raises(UnsupportedOp, match="processors with AMX"):
        ops.linear(jnp.zeros((8, 32), jnp.bfloat16), jnp.zeros((32, 32), jnp.bfloat16), implementation=JIT_AMX)


def test_its_flops_are_counted_forward_and_backward() -> None:
    x, weight = _bf16((40, 64), (64, 96))

    def loss(x: Any, weight: Any) -> jax.Array:
        return jnp.sum(ops.linear(x, weight, preferred_dtype=jnp.float32, implementation=JIT_AMX) ** 2)

    product = 2 * 40 * 64 * 96
    assert count_flops(loss, x, weight) == Flops({"bfloat16": product})
    padded = 2 * 64 * 64 * 96  # the sum over rows, to a multiple of 32
    assert count_flops(jax.grad(loss, argnums=(0, 1)), x, weight) == Flops({"bfloat16": 2 * product + padded})


def _bf16(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def _exact(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _assert_near(found: Any, exact: np.ndarray) -> None:
    """To the rounding of the sums, which are as large as the result, and of the result itself."""
    scale = np.abs(exact).max()
    rounding = 2.0**-8 if found.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(_exact(found), exact, rtol=rounding, atol=max(rounding / 16, 2e-6) * scale)
