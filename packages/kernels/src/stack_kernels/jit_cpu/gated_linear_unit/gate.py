"""What `gated_linear_unit` makes of its two products, f(gate) * up, and the gradients of that, in one pass each."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from llvmlite import ir

from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.builder import INDEX, POINTER, TILE, Builder
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read, write

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
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (size,) = builder.buffer(builder.parameters[1], 0, 1)
    builder.close(builder.ceil_div(size, _TILE_SIZE))
    builder = Builder(module, "tile", TILE)
    arguments, results, tile, _ = builder.parameters
    operands = [builder.buffer(arguments, number, 0)[0] for number in range(elementwise.operands)]
    _, (size,) = builder.buffer(results, 0, 1)
    written = [builder.buffer(results, number, 0)[0] for number in range(elementwise.results)]
    first = builder.times(tile, _TILE_SIZE)
    stop = builder.min(builder.plus(first, _TILE_SIZE), size)
    compute = _FORMULAS[elementwise.kind]

    def do(at: Any, mask: Any) -> None:
        start = builder.times(at, BITS[elementwise.dtype] // 8)
        numbers = [
            read(builder, elementwise.dtype, builder.at(operand, start), lanes, mask, None) for operand in operands
        ]
        for result, value in zip(written, compute(builder, elementwise.activation, *numbers), strict=True):
            write(builder, elementwise.dtype, value, builder.at(result, start), mask)

    builder.each_vector(first, stop, lanes, do)
    builder.close()
    return module


def _value(builder: Builder, activation: str, gate: Any, up: Any) -> list[Any]:
    activated, _ = ACTIVATIONS[activation](builder, gate)
    return [builder.build.fmul(activated, up)]


def _gradient(builder: Builder, activation: str, gate: Any, up: Any, cotangent: Any) -> list[Any]:
    activated, slope = ACTIVATIONS[activation](builder, gate)
    return [builder.build.fmul(builder.build.fmul(cotangent, up), slope), builder.build.fmul(cotangent, activated)]


_FORMULAS: dict[str, Callable[..., list[Any]]] = {"value": _value, "gradient": _gradient}
