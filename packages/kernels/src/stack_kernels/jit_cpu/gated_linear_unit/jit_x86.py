"""`gated_linear_unit` of a few rows on CPUs, with its products in machine code."""

from collections.abc import Mapping
from typing import Any

import jax

from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import gate_product
from stack_kernels.jit_cpu.linear.jit_x86 import few_rows_product, supports_few_rows

__all__ = ["JIT_X86"]


def _call(
    x: Any, w_gate: Any, w_up: Any, *, bias_gate: Any, bias_up: Any, requested: Any, **options: Any
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    def product(weight: Any, bias: Any) -> jax.Array:
        accurate = few_rows_product(x, weight)
        # The products are rounded before the gate, which reads the same numbers as the backward pass.
        result = (accurate if bias is None else accurate + bias.astype(accurate.dtype)).astype(x.dtype)
        return result.reshape(*x.shape[:-1], result.shape[1])

    gate, up = product(w_gate, bias_gate), product(w_up, bias_up)
    return gate_product(gate, up, **options), {"gate": gate, "up": up}


JIT_X86 = OpImplementation(
    op="gated_linear_unit",
    name="jit_x86",
    forward=_call,
    platforms=("cpu",),
    supports=supports_few_rows,
    residuals=("gate", "up"),
    is_opaque=True,
    exports=False,
    priority=3,
)
