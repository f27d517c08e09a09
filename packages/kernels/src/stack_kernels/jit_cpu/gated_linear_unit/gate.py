"""The gradients of f(gate) * up in `gated_linear_unit`, in one pass."""

import functools
from typing import Any

import jax
from llvmlite import ir

from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.builder import INDEX, POINTER, TILE, Builder
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read, write

__all__ = ["gate_gradients"]

_TILE_SIZE = 16384


def gate_gradients(activation: str, gate: jax.Array, up: jax.Array, cotangent: jax.Array) -> tuple[Any, Any]:
    """Returns the cotangents of gate and up: c up f'(gate) and c f(gate), of arrays of one shape and one dtype."""
    dtype = gate.dtype.name
    results = [jax.ShapeDtypeStruct((gate.size,), dtype)] * 2
    module = functools.partial(_module, activation, dtype)
    # The kernel reads buffers of one axis, and the operation is elementwise.
    flat = [operand.reshape(-1) for operand in (gate, up, cotangent)]
    found = host.kernel_call(f"gate_gradient_{activation}_{dtype}", module, results, *flat)
    of_gate, of_up = (result.reshape(gate.shape) for result in found)
    return of_gate, of_up


def _module(activation: str, dtype: str, processor: Processor) -> ir.Module:
    """Builds `@tiles` and `@tile`, which computes 16384 numbers."""
    module, lanes = ir.Module(f"gate_gradient_{activation}_{dtype}"), processor.lanes
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (size,) = builder.buffer(builder.parameters[1], 0, 1)
    builder.close(builder.ceil_div(size, _TILE_SIZE))
    builder = Builder(module, "tile", TILE)
    arguments, results, tile, _ = builder.parameters
    # Rank 0 reads no sizes: the sizes of the result are enough.
    operands = [builder.buffer(arguments, number, 0)[0] for number in range(3)]
    _, (size,) = builder.buffer(results, 0, 1)
    written = [builder.buffer(results, number, 0)[0] for number in range(2)]
    first = builder.times(tile, _TILE_SIZE)
    stop = builder.min(builder.plus(first, _TILE_SIZE), size)

    def do(at: Any, mask: Any) -> None:
        start = builder.times(at, BITS[dtype] // 8)
        numbers = [read(builder, dtype, builder.at(operand, start), lanes, mask, None) for operand in operands]
        for result, value in zip(written, _gradient(builder, activation, *numbers), strict=True):
            write(builder, dtype, value, builder.at(result, start), mask)

    builder.each_vector(first, stop, lanes, do)
    builder.close()
    return module


def _gradient(builder: Builder, activation: str, gate: Any, up: Any, cotangent: Any) -> list[Any]:
    # f is computed again, because the forward pass keeps only the two products.
    activated, slope = ACTIVATIONS[activation](builder, gate)
    return [builder.build.fmul(builder.build.fmul(cotangent, up), slope), builder.build.fmul(cotangent, activated)]
