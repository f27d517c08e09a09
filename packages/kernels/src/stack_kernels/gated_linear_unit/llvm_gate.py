"""What `gated_linear_unit` makes of its two products, f(gate) * up, and the gradients of that, in one pass each."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from llvmlite import ir

from stack_kernels.llvm import host
from stack_kernels.llvm.activations import ACTIVATIONS
from stack_kernels.llvm.code import INDEX, POINTER, Code
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, read, write

__all__ = ["gate_gradients", "gated"]

_TILE_SIZE = 16384


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """f(gate) * up, of arrays of one shape and one dtype of `WRITTEN`."""
    return _called(_Elementwise("value", gate.dtype.name, activation), gate, up)[0]


def gate_gradients(activation: str, gate: jax.Array, up: jax.Array, cotangent: jax.Array) -> tuple[Any, Any]:
    """The cotangents of gate and up: c up f'(gate) and c f(gate)."""
    of_gate, of_up = _called(_Elementwise("gradient", gate.dtype.name, activation), gate, up, cotangent)
    return of_gate, of_up


@dataclass(frozen=True)
class _Elementwise:
    """What is computed of arrays [size] of one dtype: gate and up, and for the gradient the cotangent."""

    kind: Literal["value", "gradient"]
    dtype: str
    activation: str

    @property
    def name(self) -> str:
        return f"gate_{self.kind}_{self.activation}_{self.dtype}"

    @property
    def operands(self) -> int:
        return 2 if self.kind == "value" else 3

    @property
    def results(self) -> int:
        return 1 if self.kind == "value" else 2


def _called(elementwise: _Elementwise, *operands: jax.Array) -> Sequence[jax.Array]:
    shape = operands[0].shape
    results = [jax.ShapeDtypeStruct((math.prod(shape),), operands[0].dtype)] * elementwise.results
    flat = [operand.reshape(-1) for operand in operands]
    found = host.kernel_call(elementwise.name, functools.partial(_module, elementwise), results, *flat)
    return [result.reshape(shape) for result in found]


def _module(elementwise: _Elementwise, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile`, which does 16384 numbers."""
    module, lanes = ir.Module(elementwise.name), processor.lanes
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (size,) = code.buffer(code.parameters[1], 0, 1)
    code.close(code.quotient_up(size, _TILE_SIZE))
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, tile = code.parameters
    operands = [code.buffer(arguments, number, 0)[0] for number in range(elementwise.operands)]
    _, (size,) = code.buffer(results, 0, 1)
    written = [code.buffer(results, number, 0)[0] for number in range(elementwise.results)]
    first = code.times(tile, _TILE_SIZE)
    stop = code.least(code.plus(first, _TILE_SIZE), size)
    whole = code.plus(first, code.times(code.over(code.minus(stop, first), lanes), lanes))
    compute = _FORMULAS[elementwise.kind]

    def do(at: Any, mask: Any) -> None:
        start = code.times(at, BITS[elementwise.dtype] // 8)
        numbers = [read(code, elementwise.dtype, code.at(operand, start), lanes, mask, None) for operand in operands]
        for result, value in zip(written, compute(code, elementwise.activation, *numbers), strict=True):
            write(code, elementwise.dtype, value, code.at(result, start), mask)

    with code.loop(first, whole, lanes) as at:
        do(at, None)
    with code.when(code.build.icmp_signed("<", whole, stop)):
        do(whole, code.mask(code.minus(stop, whole), lanes))
    code.close()
    return module


def _value(code: Code, activation: str, gate: Any, up: Any) -> list[Any]:
    activated, _ = ACTIVATIONS[activation](code, gate)
    return [code.build.fmul(activated, up)]


def _gradient(code: Code, activation: str, gate: Any, up: Any, cotangent: Any) -> list[Any]:
    activated, slope = ACTIVATIONS[activation](code, gate)
    return [code.build.fmul(code.build.fmul(cotangent, up), slope), code.build.fmul(cotangent, activated)]


_FORMULAS: dict[str, Callable[..., list[Any]]] = {"value": _value, "gradient": _gradient}
