"""Dot products of int8, four terms per instruction.

One operand of the instruction is unsigned: 128 is added to each of its numbers, and the resulting excess is subtracted
from the sum at the end.
"""

from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import BYTE, INT32, SHORT, Builder, vector
from stack_kernels.jit_cpu.vectors import interleaved

__all__ = ["add_fours", "added_by_fours", "fours"]

_LANES = 16


def fours(builder: Builder, rows: list[Any]) -> list[Any]:
    """Interleaves four int8 vectors, making the four numbers of each column adjacent, and adds 128 to each number."""
    # Flipping the highest bit of an int8 adds 128 and makes it a uint8.
    shift = ir.Constant(rows[0].type, [0x80] * rows[0].type.count)
    first, second, third, fourth = (builder.build.xor(row, shift) for row in rows)
    size = min(4 * _LANES, 2 * shift.type.count)
    # Bytes become pairs, and pairs become fours, in registers of 64 bytes.
    halves = (interleaved(builder, *pair, size) for pair in ((first, second), (third, fourth)))
    parts: list[Any] = []
    for pairs in zip(*halves, strict=True):
        upper, lower = (builder.build.bitcast(pair, vector(SHORT, size // 2)) for pair in pairs)
        parts += interleaved(builder, upper, lower, 2 * _LANES)
    return [builder.build.bitcast(part, vector(INT32, _LANES)) for part in parts]


def add_fours(builder: Builder, total: Any, shifted: Any, x: Any) -> Any:
    """Adds the products of the four int8 in each lane of `x` with the results of `fours`."""
    return builder.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, shifted, x)


def added_by_fours(builder: Builder, x: Any, count: Any) -> Any:
    """Returns the excess that `fours` adds to a sum over `count` numbers: 128 times the sum of the int8 at `x`.

    The excess is the same in every lane.
    """
    kind, width = vector(INT32, _LANES), 4 * _LANES
    shift = ir.Constant(vector(BYTE, width), [0x80] * width)
    total = builder.variable(kind, ir.Constant(kind, None))
    with builder.loop(0, builder.plus(count, width - 1), width) as start:
        numbers = builder.masked_load(
            shift.type, builder.at(x, start), builder.mask(builder.minus(count, start), width)
        )
        # 0x80 is 128 in the unsigned operand, so the products are 128 x.
        numbers, factor = (builder.build.bitcast(value, kind) for value in (numbers, shift))
        total.set(add_fours(builder, total.get(), factor, numbers))
    return builder.splat(builder.intrinsic(f"llvm.vector.reduce.add.v{_LANES}i32", INT32, total.get()), _LANES)
