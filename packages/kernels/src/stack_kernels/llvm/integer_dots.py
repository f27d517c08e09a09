"""Dot products of int8, four terms in one instruction.

One operand of it has no sign: 128 is added to each of its numbers, and what that adds to the sum is taken off at last.
"""

from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import BYTE, INT32, SHORT, Code, vector
from stack_kernels.llvm.vectors import interleaved

__all__ = ["add_fours", "added_by_fours", "fours"]

_LANES = 16


def fours(code: Code, rows: list[Any]) -> list[Any]:
    """Of four vectors of int8, the four numbers of each column beside each other, 128 added to each."""
    shift = ir.Constant(rows[0].type, [0x80] * rows[0].type.count)
    first, second, third, fourth = (code.build.xor(row, shift) for row in rows)
    size = min(4 * _LANES, 2 * shift.type.count)
    halves = (interleaved(code, *pair, size) for pair in ((first, second), (third, fourth)))
    parts: list[Any] = []
    for pairs in zip(*halves, strict=True):
        upper, lower = (code.build.bitcast(pair, vector(SHORT, size // 2)) for pair in pairs)
        parts += interleaved(code, upper, lower, 2 * _LANES)
    return [code.build.bitcast(part, vector(INT32, _LANES)) for part in parts]


def add_fours(code: Code, total: Any, shifted: Any, x: Any) -> Any:
    """Adds the products of the four int8 in each lane of `x` with those of `fours`."""
    return code.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, shifted, x)


def added_by_fours(code: Code, x: Any, count: Any) -> Any:
    """What `fours` adds to a sum over `count` numbers, in every lane: 128 times the sum of the int8 at `x`."""
    kind, width = vector(INT32, _LANES), 4 * _LANES
    shift = ir.Constant(vector(BYTE, width), [0x80] * width)
    total = code.variable(kind, ir.Constant(kind, None))
    with code.loop(0, code.plus(count, width - 1), width) as start:
        numbers = code.masked_load(shift.type, code.at(x, start), code.mask(code.minus(count, start), width))
        numbers, factor = (code.build.bitcast(value, kind) for value in (numbers, shift))
        total.set(add_fours(code, total.get(), factor, numbers))
    return code.splat(code.intrinsic(f"llvm.vector.reduce.add.v{_LANES}i32", INT32, total.get()), _LANES)
