"""Reads numbers of any dtype, as they are stored, into vectors of float32, and writes those of some."""

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import BYTE, FLOAT, HALF, INT32, SHORT, Code, vector
from stack_kernels.llvm.vectors import from_bfloat16

__all__ = ["BITS", "LEVELS", "WRITTEN", "read", "write"]

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
"""The bits of each value, by its dtype's name."""

LEVELS: Mapping[str, tuple[float, ...]] = {
    "float4_e2m1fn": (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    "int4": (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1),
    "uint4": tuple(range(16)),
}
"""The value of each code of 4 bits."""


def read(code: Code, dtype: str, pointer: Any, lanes: int, mask: Any | None, levels: Any | None) -> Any:
    """The next `lanes` values of a row as float32.

    Args:
      mask: which of them exist; None for all. Of two that share a byte both do or neither.
      levels: a vector of 16 values for codes of 4 bits.
    """
    if BITS[dtype] == 4:
        return _looked_up(code, _nibbles(code, pointer, lanes, mask), levels)
    return _READERS[dtype](code, _load(code, _STORED[dtype], pointer, lanes, mask), lanes)


def write(code: Code, dtype: str, values: Any, pointer: Any, mask: Any | None) -> None:
    """Stores float32 numbers as the nearest of a dtype of `WRITTEN`, the next of a row.

    Args:
      mask: which of them exist; None for all.
    """
    stored = _WRITERS[dtype](code, values, values.type.count)
    code.store(stored, pointer) if mask is None else code.masked_store(stored, pointer, mask)


def _load(code: Code, kind: ir.Type, pointer: Any, lanes: int, mask: Any | None) -> Any:
    wide = vector(kind, lanes)
    return code.load(wide, pointer) if mask is None else code.masked_load(wide, pointer, mask)


def _nibbles(code: Code, pointer: Any, lanes: int, mask: Any | None) -> Any:
    """Codes of 4 bits as int32, the low half of each byte first."""
    half = lanes // 2
    of_bytes = None if mask is None else code.shuffle(mask, mask, list(range(0, lanes, 2)))
    pairs = code.build.zext(_load(code, BYTE, pointer, half, of_bytes), vector(SHORT, half))
    spread = code.build.or_(pairs, code.build.shl(pairs, _constant(SHORT, half, 4)))
    apart = code.build.and_(spread, _constant(SHORT, half, 0x0F0F))
    return code.build.zext(code.build.bitcast(apart, vector(BYTE, lanes)), vector(INT32, lanes))


def _looked_up(code: Code, codes: Any, levels: Any) -> Any:
    """levels[codes]; each half of the levels has a permutation of its own where a register holds 8."""
    if codes.type.count == 16:
        return code.intrinsic("llvm.x86.avx512.permvar.sf.512", levels.type, levels, codes)
    low, high = (code.shuffle(levels, levels, list(range(first, first + 8))) for first in (0, 8))
    of_low, of_high = (code.intrinsic("llvm.x86.avx2.permps", half.type, half, codes) for half in (low, high))
    is_high = code.build.icmp_unsigned(">", codes, _constant(INT32, 8, 7))
    return code.build.select(is_high, of_high, of_low)


def _constant(kind: ir.Type, lanes: int, value: int) -> ir.Constant:
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def _as_it_is(code: Code, stored: Any, lanes: int) -> Any:
    return stored


def _from_bfloat16(code: Code, stored: Any, lanes: int) -> Any:
    return from_bfloat16(code, stored)


def _from_float16(code: Code, stored: Any, lanes: int) -> Any:
    return code.build.fpext(code.build.bitcast(stored, vector(HALF, lanes)), vector(FLOAT, lanes))


def _from_int8(code: Code, stored: Any, lanes: int) -> Any:
    return code.build.sitofp(code.build.sext(stored, vector(INT32, lanes)), vector(FLOAT, lanes))


def _from_uint8(code: Code, stored: Any, lanes: int) -> Any:
    return code.build.sitofp(code.build.zext(stored, vector(INT32, lanes)), vector(FLOAT, lanes))


def _from_e5m2(code: Code, stored: Any, lanes: int) -> Any:
    bits = code.build.shl(code.build.zext(stored, vector(SHORT, lanes)), _constant(SHORT, lanes, 8))
    return _from_float16(code, bits, lanes)


def _from_e4m3fn(code: Code, stored: Any, lanes: int) -> Any:
    """Shifted, a code is an fp16 number with the same sign, exponent and mantissa, but 2^8 times smaller."""
    wide = code.build.shl(code.build.sext(stored, vector(SHORT, lanes)), _constant(SHORT, lanes, 7))
    small = _from_float16(code, code.build.and_(wide, _constant(SHORT, lanes, 0xBFFF)), lanes)
    value = code.build.fmul(small, ir.Constant(vector(FLOAT, lanes), [256.0] * lanes))
    magnitude = code.build.and_(stored, _constant(BYTE, lanes, 0x7F))
    is_nan = code.build.icmp_unsigned("==", magnitude, _constant(BYTE, lanes, 0x7F))
    return code.build.select(is_nan, ir.Constant(vector(FLOAT, lanes), [float("nan")] * lanes), value)


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


def _to_bfloat16(code: Code, values: Any, lanes: int) -> Any:
    """Half of the last place is added, and a little less where the number that is kept is even."""
    bits = code.build.bitcast(values, vector(INT32, lanes))
    high = code.build.lshr(bits, _constant(INT32, lanes, 16))
    is_odd = code.build.and_(high, _constant(INT32, lanes, 1))
    rounded = code.build.add(code.build.add(bits, is_odd), _constant(INT32, lanes, 0x7FFF))
    rounded = code.build.lshr(rounded, _constant(INT32, lanes, 16))
    is_nan = code.build.fcmp_unordered("uno", values, values)
    kept = code.build.select(is_nan, code.build.or_(high, _constant(INT32, lanes, 0x40)), rounded)
    return code.build.trunc(kept, vector(SHORT, lanes))


def _to_float16(code: Code, values: Any, lanes: int) -> Any:
    return code.build.bitcast(code.build.fptrunc(values, vector(HALF, lanes)), vector(SHORT, lanes))


_WRITERS = {"float32": _as_it_is, "bfloat16": _to_bfloat16, "float16": _to_float16}
WRITTEN = tuple(_WRITERS)
"""The names of the dtypes that can be written."""
