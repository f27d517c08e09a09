from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.linear.cpu import CPU


@pytest.mark.parametrize("check", op_checks("linear"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(CPU)


@pytest.mark.parametrize("rows", [96, 131])
def test_the_gradient_of_a_bf16_weight_widens_no_operand(rows: int) -> None:
    def gradient(x: Any, weight: Any) -> Any:
        return jax.grad(lambda weight: jnp.sum(ops.linear(x, weight, implementation=CPU)).astype(jnp.float32))(weight)

    assert f"f32[{rows},64]" not in _compiled(gradient, (rows, 64), (64, 128))


def test_a_bf16_product_of_one_row_has_two() -> None:
    def linear(x: Any, weight: Any) -> Any:
        return ops.linear(x, weight, implementation=CPU)

    def row_gradient(x: Any, weight: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(linear(x, weight)).astype(jnp.float32))(x)

    assert "f32[2,128]{1,0} dot(" in _compiled(linear, (1, 64), (64, 128))
    assert "f32[2,64]{1,0} dot(" in _compiled(row_gradient, (1, 64), (64, 128))


def _compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """The optimized HLO for bf16 arguments."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()
