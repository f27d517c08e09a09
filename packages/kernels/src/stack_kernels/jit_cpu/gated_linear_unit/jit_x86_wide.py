"""`gated_linear_unit` of many rows on CPUs: XLA's products, and what is made of them in machine code."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from stack_core.abi import OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_core.ops.building import is_quantized
from stack_kernels.gated_linear_unit.xla_cpu import GatedProducts, gated_gradients, gated_linear_unit, is_plain
from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.gated_linear_unit.gate import gate_gradients, gated
from stack_kernels.jit_cpu.many_numbers import supports_many
from stack_kernels.linear.product import XLA

__all__ = ["JIT_X86_WIDE"]


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    arrays, activation = call.arrays, call.options["activation"]
    plain = is_plain(call)
    if plain is not True:
        return plain
    if any(is_quantized(array) for array in arrays.values()):
        return "an operand is quantized"
    if activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, and not {activation}"
    return supports_many(call, chip, math.prod(arrays["x"].shape[:-1]) * arrays["w_up"].shape[-1])


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    products = [XLA.times(rows, weight, rows.dtype) for weight in (w_gate, w_up)]
    return gated(activation, *products), *products


_WIDE = GatedProducts(_gated, XLA, gate_gradients)

JIT_X86_WIDE = OpImplementation(
    op="gated_linear_unit",
    name="jit_x86_wide",
    forward=functools.partial(gated_linear_unit, _WIDE),
    backward=functools.partial(gated_gradients, _WIDE),
    platforms=("cpu",),
    supports=_supports,
    residuals=("gate", "up"),
    is_opaque=True,
    exports=False,
    priority=2,
)
