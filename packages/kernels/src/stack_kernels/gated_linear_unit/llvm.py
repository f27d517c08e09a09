"""`gated_linear_unit` of a few rows on CPUs, its products in machine code."""

from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi import OpImplementation
from stack_core.ops.building import ACTIVATIONS
from stack_kernels.linear.llvm import few_rows_product, supports_few_rows

__all__ = ["LLVM"]


def _call(x: Any, w_gate: Any, w_up: Any, *, activation: str) -> jax.Array:
    gate, up = (few_rows_product(x, weight).astype(x.dtype).astype(jnp.float32) for weight in (w_gate, w_up))
    gated = ACTIVATIONS[activation](gate) * up
    return gated.astype(x.dtype).reshape(*x.shape[:-1], up.shape[1])


LLVM = OpImplementation(op="gated_linear_unit", name="llvm", function=_call, supports=supports_few_rows, priority=3)
