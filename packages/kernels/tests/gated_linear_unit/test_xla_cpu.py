from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.gated_linear_unit.xla_cpu import XLA_CPU


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("gated_linear_unit"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


def test_the_backward_pass_finds_x_and_the_two_products_saved_and_nothing_in_fp32() -> None:
    x, weight = jnp.ones((6, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)

    def saved(x: Any, w_gate: Any, w_up: Any) -> Any:
        return jax.vjp(lambda *arrays: ops.gated_linear_unit(*arrays, implementation=XLA_CPU), x, w_gate, w_up)[1]

    residuals = jax.tree.leaves(jax.eval_shape(saved, x, weight, weight))
    assert sorted((*r.shape, r.dtype.name) for r in residuals) == [
        (6, 32, "bfloat16"),
        (6, 32, "bfloat16"),
        (6, 64, "bfloat16"),
        (64, 32, "bfloat16"),
        (64, 32, "bfloat16"),
    ]
