from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.rope.xla_cpu import XLA_CPU


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("rope"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


def test_sines_are_not_computed_for_every_head() -> None:
    shapes = jax.ShapeDtypeStruct((2, 64, 16, 32), jnp.float32), jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def loops_over_heads_with_sines(implementation: Any) -> list[str]:
        def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
            return ops.rope(x, positions, implementation=implementation)

        program = jax.jit(rope).lower(*shapes).compile().as_text()
        assert program is not None
        return [loop for loop in program.split("\n}") if " sine(" in loop and "[2,64,16,16]" in loop]

    assert loops_over_heads_with_sines("reference")
    assert not loops_over_heads_with_sines(XLA_CPU)
