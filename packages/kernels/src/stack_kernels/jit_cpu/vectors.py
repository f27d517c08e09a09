"""Functions of vectors, mostly of float32."""

import math
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INT32, SHORT, Builder, vector

__all__ = [
    "any_lane",
    "as_bfloat16",
    "constant",
    "exp",
    "from_bfloat16",
    "interleaved",
    "reduce_max",
    "sums",
    "tanh",
    "total",
    "transposed",
]

# ln 2 in two parts (Cody and Waite): the first, 355 / 512, has few bits, so its multiples by a power are exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def constant(value: float | int, lanes: int) -> ir.Constant:
    """Returns a vector with the same number in every lane."""
    return ir.Constant(vector(FLOAT, lanes), [float(value)] * lanes)


def exp(builder: Builder, x: Any) -> Any:
    """Computes the exponential to 2 units in the last place.

    Inputs below -87.3 count as -87.3, the end of normal results.

    NaN stays NaN; otherwise an invalid score would become a small weight.

    Source: Moshier, Cephes Mathematical Library, expf.
    """
    lanes, given = x.type.count, x
    x = _min(builder, _max(builder, x, constant(-87.3, lanes)), constant(88.3, lanes))
    power = builder.intrinsic(
        f"llvm.nearbyint.v{lanes}f32", x.type, builder.build.fmul(x, constant(1 / math.log(2), lanes))
    )
    rest = builder.fma(power, constant(-_LN2_HIGH, lanes), x)
    rest = builder.fma(power, constant(-_LN2_LOW, lanes), rest)
    # exp(rest) = 1 + rest + rest^2 p(rest), with |rest| <= ln 2 / 2.
    series = constant(_EXP[0], lanes)
    for coefficient in _EXP[1:]:
        series = builder.fma(series, rest, constant(coefficient, lanes))
    fraction = builder.build.fadd(builder.fma(series, builder.build.fmul(rest, rest), rest), constant(1, lanes))
    # Multiplies by 2^power in the exponent field. The limits of x keep the power within -126 .. 127.
    bits = builder.build.shl(builder.build.fptosi(power, vector(INT32, lanes)), _integers(23, lanes))
    found = builder.build.bitcast(
        builder.build.add(builder.build.bitcast(fraction, vector(INT32, lanes)), bits), x.type
    )
    return builder.build.select(builder.build.fcmp_unordered("uno", given, given), given, found)


def tanh(builder: Builder, x: Any) -> Any:
    """Computes 1 - 2 / (exp(2 x) + 1)."""
    lanes = x.type.count
    grown = builder.build.fadd(exp(builder, builder.build.fadd(x, x)), constant(1, lanes))
    return builder.build.fsub(constant(1, lanes), builder.build.fdiv(constant(2, lanes), grown))


def as_bfloat16(builder: Builder, x: Any, more: Any | None = None) -> Any:
    """Rounds 16 or 32 numbers to the nearest bf16, as int16, on a processor with bf16 dot products."""
    if more is None:
        return builder.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(SHORT, 16), x)
    # The instruction writes its first operand to the upper half.
    return builder.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(SHORT, 32), more, x)


def from_bfloat16(builder: Builder, x: Any) -> Any:
    """Converts bf16 numbers, stored as int16, to float32."""
    lanes = x.type.count
    bits = builder.build.shl(builder.build.zext(x, vector(INT32, lanes)), _integers(16, lanes))
    return builder.build.bitcast(bits, vector(FLOAT, lanes))


def any_lane(builder: Builder, mask: Any) -> Any:
    """Checks whether any lane of a boolean vector is true."""
    lanes = ir.IntType(mask.type.count)
    return builder.build.icmp_unsigned("!=", builder.build.bitcast(mask, lanes), lanes(0))


def reduce_max(builder: Builder, x: Any) -> Any:
    """Returns the maximum of a vector's lanes, ignoring NaN."""
    return builder.intrinsic(f"llvm.vector.reduce.fmax.v{x.type.count}f32", FLOAT, x)


def total(builder: Builder, x: Any) -> Any:
    """Returns the sum of a vector's lanes."""
    # Both inputs of a round are equal, so the second half of the result repeats the first.
    (summed,) = _halved(builder, [x, x], x.type.count // 2)
    for half in _halves(x.type.count // 2):
        (summed,) = _halved(builder, [summed, summed], half)
    return builder.build.extract_element(summed, INT32(0))


def sums(builder: Builder, vectors: list[Any]) -> Any:
    """Returns a vector whose lane j is the sum of the lanes of vector j; there are as many vectors as lanes.

    Each round adds the halves of every remaining vector and merges two vectors into one.
    """
    for half in (vectors[0].type.count // 2, *_halves(vectors[0].type.count // 2)):
        vectors = _halved(builder, vectors, half)
    return vectors[0]


def interleaved(builder: Builder, first: Any, second: Any, size: int) -> list[Any]:
    """Alternates the elements of two vectors of any kind, in vectors of `size`."""
    count = first.type.count
    order = [lane + other for lane in range(count) for other in (0, count)]
    return [builder.shuffle(first, second, order[start : start + size]) for start in range(0, 2 * count, size)]


def transposed(builder: Builder, rows: list[Any]) -> list[Any]:
    """Transposes as many vectors as they have lanes: each round interleaves the elements of pairs of vectors."""
    half = len(rows) // 2
    for _ in range(half.bit_length()):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [part for pair in pairs for part in interleaved(builder, *pair, 2 * half)]
    return rows


def _halves(count: int) -> list[int]:
    return [] if count == 1 else [count // 2, *_halves(count // 2)]


def _halved(builder: Builder, vectors: list[Any], half: int) -> list[Any]:
    """Adds halves within parts of 2 * half lanes; each part belongs to one sum."""
    lanes = vectors[0].type.count
    low = [lane for first in range(0, 2 * lanes, 2 * half) for lane in range(first, first + half)]
    high = [lane + half for lane in low]
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [builder.build.fadd(builder.shuffle(x, y, low), builder.shuffle(x, y, high)) for x, y in pairs]


def _integers(value: int, lanes: int) -> ir.Constant:
    return ir.Constant(vector(INT32, lanes), [value] * lanes)


def _max(builder: Builder, x: Any, y: Any) -> Any:
    return builder.build.select(builder.build.fcmp_ordered(">", x, y), x, y)


def _min(builder: Builder, x: Any, y: Any) -> Any:
    return builder.build.select(builder.build.fcmp_ordered("<", x, y), x, y)
