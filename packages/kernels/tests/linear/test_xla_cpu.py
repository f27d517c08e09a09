from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.linear.xla_cpu import XLA_CPU


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("linear"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


@pytest.mark.parametrize(("d_in", "d_out"), [(0, 4), (4, 0)])
def test_gradients_without_features_are_zero(d_in: int, d_out: int) -> None:
    def total(x: Any, weight: Any) -> Any:
        of_linear = ops.linear(x, weight, implementation="xla_cpu")
        return jnp.sum(of_linear + ops.gated_linear_unit(x, weight, weight, implementation="xla_cpu"))

    operands = jnp.ones((2, 3, d_in)), jnp.ones((d_in, d_out))
    found = jax.grad(total, (0, 1))(*operands)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(jnp.zeros_like, operands))


@pytest.mark.parametrize("rows", [96, 131])
def test_the_gradient_of_a_bf16_weight_widens_no_operand(rows: int) -> None:
    def gradient(x: Any, weight: Any) -> Any:
        return jax.grad(lambda weight: jnp.sum(ops.linear(x, weight, implementation=XLA_CPU)).astype(jnp.float32))(
            weight
        )

    assert f"f32[{rows},64]" not in _compiled(gradient, (rows, 64), (64, 128))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("d_in", "d_out"), [(16, 3), (96, 40), (1408, 64)])
def test_a_product_of_one_row_is_exact_to_its_dtype(dtype: Any, d_in: int, d_out: int) -> None:
    keys = jax.random.split(jax.random.key(d_in))
    x, weight = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, [(1, d_in), (d_in, d_out)], strict=True)
    )
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    found = jax.jit(lambda x, weight: ops.linear(x, weight, preferred_dtype=jnp.float32, implementation=XLA_CPU))(
        x, weight
    )
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * d_in**0.5)


def test_one_row_of_no_features_is_zero() -> None:
    output = ops.linear(jnp.zeros((1, 0)), jnp.zeros((0, 3)), implementation=XLA_CPU)
    np.testing.assert_array_equal(output, np.zeros((1, 3)))


def test_a_product_of_one_row_is_one_pass_over_the_weight() -> None:
    def linear(x: Any, weight: Any) -> Any:
        return ops.linear(x, weight, implementation=XLA_CPU)

    def row_gradient(x: Any, weight: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(linear(x, weight)).astype(jnp.float32))(x)

    assert " dot(" not in _compiled(linear, (1, 64), (64, 128), jnp.float32)
    # In bf16 two rows are what the backend is fast at, where it does not vectorize the sums: in jax 0.10.
    assert (" dot(" in _compiled(linear, (1, 64), (64, 128))) == (jax.__version_info__ < (0, 11))
    assert "f32[2,128]{1,0} dot(" in _compiled(linear, (1, 60), (60, 128))
    assert "f32[2,64]{1,0} dot(" in _compiled(row_gradient, (1, 64), (64, 128))


def _compiled(
    function: Callable[..., Any], x: tuple[int, ...], weight: tuple[int, ...], dtype: Any = jnp.bfloat16
) -> str:
    """The optimized HLO."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, weight)]
    return jax.jit(function).lower(*arguments).compile().as_text()
