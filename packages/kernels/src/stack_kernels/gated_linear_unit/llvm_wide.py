"""`gated_linear_unit` of many rows on CPUs: XLA's products, and what is made of them in machine code."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from llvmlite import ir

from stack_core.abi import AUTODIFF, OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_core.ops.building import is_quantized
from stack_kernels.gated_linear_unit.cpu import GatedProducts, gated_linear_unit
from stack_kernels.linear.product import XLA
from stack_kernels.llvm import host
from stack_kernels.llvm.code import INDEX, POINTER, Code
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.many_numbers import supports_many
from stack_kernels.llvm.numbers import BITS, read, write
from stack_kernels.llvm.vectors import ACTIVATIONS

__all__ = ["LLVM_WIDE"]

_TILE_SIZE = 16384


@dataclass(frozen=True)
class _Gate:
    """y = f(gate) * up of two arrays [size] of one dtype, one of `WRITTEN`."""

    dtype: str
    activation: str

    @property
    def name(self) -> str:
        return f"gate_{self.activation}_{self.dtype}"


def _module(gate: _Gate, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile`, which does 16384 numbers."""
    module, lanes = ir.Module(gate.name), processor.lanes
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (size,) = code.buffer(code.parameters[1], 0, 1)
    code.close(code.quotient_up(size, _TILE_SIZE))
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, tile = code.parameters
    operands = [code.buffer(arguments, number, 0)[0] for number in range(2)]
    y, (size,) = code.buffer(results, 0, 1)
    first = code.times(tile, _TILE_SIZE)
    stop = code.least(code.plus(first, _TILE_SIZE), size)
    whole = code.plus(first, code.times(code.over(code.minus(stop, first), lanes), lanes))

    def multiply(at: Any, mask: Any) -> None:
        start = code.times(at, BITS[gate.dtype] // 8)
        opened, up = (read(code, gate.dtype, code.at(operand, start), lanes, mask, None) for operand in operands)
        gated = code.build.fmul(ACTIVATIONS[gate.activation](code, opened), up)
        write(code, gate.dtype, gated, code.at(y, start), mask)

    with code.loop(first, whole, lanes) as at:
        multiply(at, None)
    with code.when(code.build.icmp_signed("<", whole, stop)):
        multiply(whole, code.mask(code.minus(stop, whole), lanes))
    code.close()
    return module


def _supports(call: OpCall, chip: Chip) -> bool | str:
    arrays, activation = call.arrays, call.options["activation"]
    if any(is_quantized(array) for array in arrays.values()):
        return "an operand is quantized"
    if activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, and not {activation}"
    return supports_many(call, chip, math.prod(arrays["x"].shape[:-1]) * arrays["w_up"].shape[-1])


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    products = [XLA.times(rows, weight, rows.dtype) for weight in (w_gate, w_up)]
    gate = _Gate(rows.dtype.name, activation)
    result = jax.ShapeDtypeStruct((products[0].size,), rows.dtype)
    flat = [product.reshape(-1) for product in products]
    gated = host.kernel_call(gate.name, functools.partial(_module, gate), result, *flat)
    return gated.reshape(products[0].shape), *products


LLVM_WIDE = OpImplementation(
    op="gated_linear_unit",
    name="llvm_wide",
    function=functools.partial(gated_linear_unit, GatedProducts(_gated, XLA)),
    supports=_supports,
    vjp=AUTODIFF,
    priority=2,
)
