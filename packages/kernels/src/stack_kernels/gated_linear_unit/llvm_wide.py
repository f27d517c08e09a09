"""`gated_linear_unit` of many rows on CPUs: XLA's products, and what is made of them in machine code."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from stack_core.abi import AUTODIFF, OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_core.ops.building import is_quantized
from stack_kernels.gated_linear_unit.cpu import GatedProducts, gated_linear_unit
from stack_kernels.gated_linear_unit.llvm_gate import gate_gradients, gated
from stack_kernels.linear.product import XLA
from stack_kernels.llvm.activations import ACTIVATIONS
from stack_kernels.llvm.many_numbers import supports_many

__all__ = ["LLVM_WIDE"]


def _supports(call: OpCall, chip: Chip) -> bool | str:
    arrays, activation = call.arrays, call.options["activation"]
    if any(is_quantized(array) for array in arrays.values()):
        return "an operand is quantized"
    if activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, and not {activation}"
    return supports_many(call, chip, math.prod(arrays["x"].shape[:-1]) * arrays["w_up"].shape[-1])


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    products = [XLA.times(rows, weight, rows.dtype) for weight in (w_gate, w_up)]
    return gated(activation, *products), *products


LLVM_WIDE = OpImplementation(
    op="gated_linear_unit",
    name="llvm_wide",
    function=functools.partial(gated_linear_unit, GatedProducts(_gated, XLA, gate_gradients)),
    supports=_supports,
    vjp=AUTODIFF,
    priority=2,
)
