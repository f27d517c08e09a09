from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu.gated_linear_unit.jit_x86_wide import JIT_X86_WIDE
from stack_kernels.jit_cpu.host import Processor

_SIZE = "stack_kernels.jit_cpu.many_numbers.LEAST_SIZE"


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("gated_linear_unit"), ids=str)
def test_contract(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SIZE, 1)
    check(JIT_X86_WIDE)


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "relu_squared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_those_of_the_reference(processor: Processor, dtype: str, activation: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size) / 3, dtype) for size in ((301, 20), (20, 127), (20, 127))]

    def of(implementation: Any) -> Any:
        def loss(arrays: Any) -> tuple[jax.Array, jax.Array]:
            gated = ops.gated_linear_unit(*arrays, activation=activation, implementation=implementation)
            return jnp.sum(jnp.sin(gated.astype(jnp.float32))), gated

        return jax.jit(jax.grad(loss, has_aux=True))(arrays)

    rounding = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for found, expected in zip(*map(jax.tree.leaves, (of(JIT_X86_WIDE), of("reference"))), strict=True):
        exact = np.asarray(expected, np.float64)
        scale = np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rounding, atol=rounding * scale)


def test_it_is_for_many_numbers() -> None:
    x, weight = jnp.zeros((65, 8)), jnp.zeros((8, 64))
    with pytest.raises(UnsupportedOp, match="32768 numbers or more, and the result has 4160"):
        ops.gated_linear_unit(x, weight, weight, implementation=JIT_X86_WIDE)
    (decision,) = ops.explain(ops.gated_linear_unit, jnp.zeros((600, 8)), weight, weight)
    assert decision.forward.implementation.name == "jit_x86_wide"
