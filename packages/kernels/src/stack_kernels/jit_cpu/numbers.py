"""Conversions between stored numbers of any dtype and vectors of float32."""

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import BYTE, FLOAT, HALF, INT32, SHORT, Builder, vector
from stack_kernels.jit_cpu.vectors import from_bfloat16

__all__ = ["BITS", "LEVELS", "WRITTEN", "read", "read_pairs", "write"]

BITS: Mapping[str, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "uint8": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
}
"""Bits per value, by name of the dtype."""

LEVELS: Mapping[str, tuple[float, ...]] = {
    "float4_e2m1fn": (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    "int4": (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1),
    "uint4": tuple(range(16)),
}
"""Value of each 4-bit code."""


def read(builder: Builder, dtype: str, pointer: Any, lanes: int, mask: Any | None, levels: Any | None) -> Any:
    """Reads the next `lanes` values of a row as float32.

    Args:
      builder: the builder of the function.
      dtype: name of the stored dtype.
      pointer: address of the first value.
      lanes: number of values.
      mask: lanes that exist; None for all. Two values that share a byte both exist or both do not.
      levels: vector of 16 values for 4-bit codes.
    """
    if BITS[dtype] == 4:
        return _looked_up(builder, _nibbles(builder, pointer, lanes, mask), levels)
    return _READERS[dtype](builder, _load(builder, _STORED[dtype], pointer, lanes, mask), lanes)


def read_pairs(builder: Builder, dtype: str, pointer: Any, lanes: int, levels: Any) -> tuple[Any, Any]:
    """Reads the next `2 * lanes` values of 4 bits of a row as float32, and returns even and odd columns separately.

    Takes fewer than half the instructions of two calls of `read`.

    Args:
      builder: the builder of the function.
      dtype: name of the stored dtype.
      pointer: address of the first value.
      lanes: number of values of each result.
      levels: vector of the values of the 16 codes; None for the integers themselves.
    """
    stored, wide = builder.load(vector(BYTE, lanes), pointer), vector(INT32, lanes)
    build, floats = builder.build, vector(FLOAT, lanes)
    if levels is None and dtype == "int4":
        pairs = build.sext(stored, wide)
        low = build.ashr(build.shl(pairs, _constant(INT32, lanes, 28)), _constant(INT32, lanes, 28))
        high = build.ashr(pairs, _constant(INT32, lanes, 4))
        return build.sitofp(low, floats), build.sitofp(high, floats)
    pairs = build.zext(stored, wide)
    high = build.lshr(pairs, _constant(INT32, lanes, 4))
    if levels is None:
        low = build.and_(pairs, _constant(INT32, lanes, 15))
        return build.sitofp(low, floats), build.sitofp(high, floats)
    return _looked_up(builder, pairs, levels), _looked_up(builder, high, levels)


def write(builder: Builder, dtype: str, values: Any, pointer: Any, mask: Any | None) -> None:
    """Stores float32 numbers as the next of a row, rounded to the nearest in a dtype of `WRITTEN`.

    Args:
      builder: the builder of the function.
      dtype: name of the stored dtype.
      values: vector of numbers.
      pointer: address of the first value.
      mask: lanes that exist; None for all.
    """
    stored = _WRITERS[dtype](builder, values, values.type.count)
    builder.store(stored, pointer) if mask is None else builder.masked_store(stored, pointer, mask)


def _load(builder: Builder, kind: ir.Type, pointer: Any, lanes: int, mask: Any | None) -> Any:
    wide = vector(kind, lanes)
    return builder.load(wide, pointer) if mask is None else builder.masked_load(wide, pointer, mask)


def _nibbles(builder: Builder, pointer: Any, lanes: int, mask: Any | None) -> Any:
    """Unpacks 4-bit codes to int32, the low half of each byte first."""
    half = lanes // 2
    # The two codes of a byte both exist or both do not, so every second lane of the mask describes a byte.
    of_bytes = None if mask is None else builder.shuffle(mask, mask, list(range(0, lanes, 2)))
    pairs = builder.build.zext(_load(builder, BYTE, pointer, half, of_bytes), vector(SHORT, half))
    # 0x00HL becomes 0x0H0L: the bytes L and H, in memory order.
    spread = builder.build.or_(pairs, builder.build.shl(pairs, _constant(SHORT, half, 4)))
    apart = builder.build.and_(spread, _constant(SHORT, half, 0x0F0F))
    return builder.build.zext(builder.build.bitcast(apart, vector(BYTE, lanes)), vector(INT32, lanes))


def _looked_up(builder: Builder, codes: Any, levels: Any) -> Any:
    """Computes levels[codes & 15]; if a register holds 8 lanes, each half of the levels has its own permutation."""
    if codes.type.count == 16:
        return builder.intrinsic("llvm.x86.avx512.permvar.sf.512", levels.type, levels, codes)
    low, high = (builder.shuffle(levels, levels, list(range(first, first + 8))) for first in (0, 8))
    of_low, of_high = (builder.intrinsic("llvm.x86.avx2.permps", half.type, half, codes) for half in (low, high))
    # Bit 3 of a code becomes the sign, by which the processor selects.
    signs = builder.build.shl(codes, _constant(INT32, 8, 28))
    is_high = builder.build.icmp_signed("<", signs, ir.Constant(signs.type, None))
    return builder.build.select(is_high, of_high, of_low)


def _constant(kind: ir.Type, lanes: int, value: int) -> ir.Constant:
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def _as_it_is(builder: Builder, stored: Any, lanes: int) -> Any:
    return stored


def _from_bfloat16(builder: Builder, stored: Any, lanes: int) -> Any:
    return from_bfloat16(builder, stored)


def _from_float16(builder: Builder, stored: Any, lanes: int) -> Any:
    return builder.build.fpext(builder.build.bitcast(stored, vector(HALF, lanes)), vector(FLOAT, lanes))


def _from_int8(builder: Builder, stored: Any, lanes: int) -> Any:
    return builder.build.sitofp(builder.build.sext(stored, vector(INT32, lanes)), vector(FLOAT, lanes))


def _from_uint8(builder: Builder, stored: Any, lanes: int) -> Any:
    return builder.build.sitofp(builder.build.zext(stored, vector(INT32, lanes)), vector(FLOAT, lanes))


def _from_e5m2(builder: Builder, stored: Any, lanes: int) -> Any:
    bits = builder.build.shl(builder.build.zext(stored, vector(SHORT, lanes)), _constant(SHORT, lanes, 8))
    return _from_float16(builder, bits, lanes)


def _from_e4m3fn(builder: Builder, stored: Any, lanes: int) -> Any:
    """Shifts a code to an fp16 number with equal sign, exponent and mantissa but 2^8 times smaller, then scales it."""
    wide = builder.build.shl(builder.build.sext(stored, vector(SHORT, lanes)), _constant(SHORT, lanes, 7))
    # The mask clears bit 14, a second copy of the sign: fp16's exponent has a fifth bit there.
    small = _from_float16(builder, builder.build.and_(wide, _constant(SHORT, lanes, 0xBFFF)), lanes)
    value = builder.build.fmul(small, ir.Constant(vector(FLOAT, lanes), [256.0] * lanes))
    magnitude = builder.build.and_(stored, _constant(BYTE, lanes, 0x7F))
    is_nan = builder.build.icmp_unsigned("==", magnitude, _constant(BYTE, lanes, 0x7F))
    return builder.build.select(is_nan, ir.Constant(vector(FLOAT, lanes), [float("nan")] * lanes), value)


_STORED = {"float32": FLOAT, "bfloat16": SHORT, "float16": SHORT}
_STORED |= {dtype: BYTE for dtype, bits in BITS.items() if bits == 8}
_READERS = {
    "float32": _as_it_is,
    "bfloat16": _from_bfloat16,
    "float16": _from_float16,
    "int8": _from_int8,
    "uint8": _from_uint8,
    "float8_e4m3fn": _from_e4m3fn,
    "float8_e5m2": _from_e5m2,
}


def _to_bfloat16(builder: Builder, values: Any, lanes: int) -> Any:
    """Rounds to nearest even: adds half of the last place, or a little less if the kept number is even."""
    bits = builder.build.bitcast(values, vector(INT32, lanes))
    high = builder.build.lshr(bits, _constant(INT32, lanes, 16))
    is_odd = builder.build.and_(high, _constant(INT32, lanes, 1))
    rounded = builder.build.add(builder.build.add(bits, is_odd), _constant(INT32, lanes, 0x7FFF))
    rounded = builder.build.lshr(rounded, _constant(INT32, lanes, 16))
    is_nan = builder.build.fcmp_unordered("uno", values, values)
    # Rounding could carry a NaN to infinity or zero; with this bit set, its upper half is a quiet NaN.
    kept = builder.build.select(is_nan, builder.build.or_(high, _constant(INT32, lanes, 0x40)), rounded)
    return builder.build.trunc(kept, vector(SHORT, lanes))


def _to_float16(builder: Builder, values: Any, lanes: int) -> Any:
    return builder.build.bitcast(builder.build.fptrunc(values, vector(HALF, lanes)), vector(SHORT, lanes))


_WRITERS = {"float32": _as_it_is, "bfloat16": _to_bfloat16, "float16": _to_float16}
WRITTEN = tuple(_WRITERS)
"""Names of the dtypes that can be written."""
