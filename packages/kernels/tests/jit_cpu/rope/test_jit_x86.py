from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.rope.jit_x86 import JIT_X86

_SIZE = "stack_kernels.jit_cpu.many_numbers.MIN_SIZE"
_ROWS = "stack_kernels.jit_cpu.many_numbers.MIN_ROWS"


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("rope"), ids=str)
def test_contract(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SIZE, 1)
    monkeypatch.setattr(_ROWS, 1)
    check(JIT_X86)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (100, 36)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_heads_of_any_size_turn_forward_and_back(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int, rotary_dim: int
) -> None:
    monkeypatch.setattr(_SIZE, 1)
    monkeypatch.setattr(_ROWS, 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 33, 3, head_dim)), dtype)
    positions = jnp.arange(66).reshape(2, 33)

    def turned(implementation: Any) -> tuple[Any, Any]:
        def loss(x: Any) -> tuple[Any, Any]:
            y = ops.rope(x, positions, rotary_dim=rotary_dim, implementation=implementation)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        gradient, y = jax.grad(loss, has_aux=True)(x)
        return y, gradient

    rounding = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for found, expected in zip(turned(JIT_X86), turned("reference"), strict=True):
        exact = np.asarray(expected, np.float64)
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rounding, atol=rounding)


def test_what_it_does_not_take_is_refused_with_the_reason() -> None:
    positions = jnp.arange(64)
    with pytest.raises(UnsupportedOp, match="32768 numbers or more"):
        ops.rope(jnp.zeros((64, 1, 8)), positions, implementation=JIT_X86)
    with pytest.raises(UnsupportedOp, match="64 rows or more"):
        ops.rope(jnp.zeros((63, 16, 64)), positions[:63], implementation=JIT_X86)
    with pytest.raises(UnsupportedOp, match="turns halves"):
        ops.rope(jnp.zeros((64, 16, 64)), positions, interleaved=True, implementation=JIT_X86)
