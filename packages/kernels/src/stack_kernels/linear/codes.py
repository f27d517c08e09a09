"""Decoding of quantized values by arithmetic that XLA's CPU backend vectorizes.

XLA's own conversions of fp8 and 4-bit codes, and its gather from a codebook, take 2 to 5 times as long.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from stack_core.abi.ops import QView
from stack_core.ops.building import QuantizedArray, dequantize

__all__ = ["Columns", "columns", "decoded", "dequantized", "interleaved"]

_SELECTED_LEVELS = 16
_FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")


@dataclass(frozen=True)
class Columns:
    """A subset of the columns of a quantized weight.

    Attributes:
      stored: [d_in, columns], as stored in memory.
      decode: elementwise function from `stored`, or any part of it, to values: int8 or uint8 for integer codes of up to
        8 bits without a codebook, else float32.
      scale: float32[tiles, columns or 1], relative to the decoded values.
      zero_point: shaped as `scale`, relative to the decoded values; or None.
    """

    stored: jax.Array
    decode: Callable[[jax.Array], jax.Array]
    scale: jax.Array
    zero_point: jax.Array | None

    def dense(self, dtype: DTypeLike) -> jax.Array:
        """Dequantizes to [d_in, columns] in `dtype`.

        The barrier keeps the conversion out of the product, where it is slow.
        """
        view = QView((1, 0), self.decode(self.stored), self.scale, self.zero_point, "columns")
        return lax.optimization_barrier(dequantize(QuantizedView(view), dtype))


@dataclass(frozen=True)
class QuantizedView:
    view: QView

    def __stack_qview__(self) -> QView:
        return self.view


def columns(weight: QuantizedArray) -> tuple[Columns, ...]:
    """Splits a quantized [d_in, d_out] into even and odd columns if two codes share a byte.

    Otherwise returns all columns.

    Codes of 4 bits are never combined in one array, because interleaving them is the dominant cost. `interleaved` does
    so for the products, which are smaller.
    """
    view = weight.__stack_qview__()
    d_out = view.qvalue.shape[1]
    parts = jax.tree.map(lambda part: _spread(part, d_out), _in_units(view))
    if view.qvalue.dtype.name not in _FOUR_BITS or d_out % 2:
        decode = _decoder(view.qvalue.dtype, view.codebook)
        return (Columns(_stored(view.qvalue), decode, *parts),)
    pairs = view.qvalue.reshape(-1, d_out // 2, 2)
    # Without the barrier, XLA of jax 0.11 unpacks the codes again, one by one, in every loop that reads them.
    stored = lax.optimization_barrier(lax.bitcast_convert_type(pairs, jnp.int8))

    def every_second(half: int) -> Columns:
        decode = _nibble_decoder(view.qvalue.dtype, view.codebook, half)
        return Columns(stored, decode, *jax.tree.map(lambda part: _half(part, half), parts))

    return every_second(0), every_second(1)


def interleaved(parts: list[jax.Array]) -> jax.Array:
    """Combines the products with each of `columns` to [rows, d_out]."""
    if len(parts) == 1:
        return parts[0]
    rows, width = parts[0].shape
    return jnp.stack(parts, axis=-1).reshape(rows, 2 * width)


def dequantized(array: QuantizedArray, dtype: DTypeLike) -> jax.Array:
    """Computes the same as `ops.dequantize`, faster."""
    return dequantize(QuantizedView(decoded(array.__stack_qview__())), dtype)


def decoded(view: QView) -> QView:
    """Replaces the codes by values (int8, uint8 or float32) with float32 scales relative to these values."""
    values = _decoder(view.qvalue.dtype, view.codebook)(_stored(view.qvalue))
    scale, zero_point = _in_units(view)
    return dataclasses.replace(view, qvalue=values, scale=scale, zero_point=zero_point, codebook=None)


def _in_units(view: QView) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale times the unit of decoded values, and the zero point divided by that unit."""
    scale, zero_point = view.scale.astype(jnp.float32), view.zero_point
    unit = np.float32(_UNITS.get(view.qvalue.dtype.name, 1))
    if unit == 1:
        return scale, zero_point
    return scale * unit, None if zero_point is None else zero_point.astype(jnp.float32) / unit


def _spread(part: jax.Array, d_out: int) -> jax.Array:
    """Repeats scales or zero points over the columns that they cover: [tiles, d_out or 1]."""
    return part if part.shape[1] in (1, d_out) else jnp.repeat(part, d_out // part.shape[1], axis=1)


def _half(part: jax.Array, half: int) -> jax.Array:
    return part if part.shape[1] == 1 else part[:, half::2]


def _stored(codes: jax.Array) -> jax.Array:
    """Returns fp8 as bytes: XLA's CPU backend is slow at every fp8 operation, including slicing."""
    return lax.bitcast_convert_type(codes, jnp.int8) if codes.dtype.name in _FROM_BYTES else codes


def _decoder(dtype: jnp.dtype, codebook: jax.Array | None) -> Callable[[jax.Array], jax.Array]:
    if codebook is not None:
        return lambda codes: _looked_up(codes, codebook)
    if jnp.issubdtype(dtype, jnp.integer):
        narrow = jnp.iinfo(dtype).bits < 8
        return (lambda codes: codes.astype(jnp.int8)) if narrow else (lambda codes: codes)
    unit = np.float32(_UNITS.get(dtype.name, 1))
    return _FROM_BYTES.get(dtype.name, lambda codes: codes.astype(jnp.float32) / unit)


def _nibble_decoder(dtype: jnp.dtype, codebook: jax.Array | None, half: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a decoder of int8 bytes that hold two 4-bit codes, the first in the low half."""

    def signed(pair: jax.Array) -> jax.Array:
        return pair >> np.int8(4) if half else (pair & np.int8(15) ^ np.int8(8)) - np.int8(8)

    def unsigned(pair: jax.Array) -> jax.Array:
        return (pair >> np.int8(4) if half else pair) & np.int8(15)

    if dtype.name == "float4_e2m1fn":
        return _from_high_e2m1fn if half else _from_low_e2m1fn
    integer = signed if dtype.name == "int4" else unsigned
    return integer if codebook is None else lambda pair: _looked_up(integer(pair), codebook)


def _looked_up(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    """Computes codebook[codes] by a tree of selects, one bit of the code per level, or by a gather for many levels."""
    levels, lowest = codebook.shape[0], codes.dtype.type(0)
    if levels > _SELECTED_LEVELS:
        return jnp.take(codebook, codes.astype(jnp.int32), mode="clip")
    codes = jnp.clip(codes, lowest, codes.dtype.type(levels - 1))
    chosen = [codebook[level] for level in range(levels)]
    bit = 1
    while len(chosen) > 1:
        is_set = (codes & codes.dtype.type(bit)) != lowest
        pairs = [chosen[at : at + 2] for at in range(0, len(chosen), 2)]
        chosen = [jnp.where(is_set, pair[-1], pair[0]) for pair in pairs]
        bit *= 2
    return jnp.broadcast_to(chosen[0], codes.shape)


# An fp8 or fp4 code, shifted, is an fp16 number with the same sign, exponent and mantissa but another exponent bias,
# including subnormals. The scale absorbs the power of two between the biases. Widening and shifting right copy the sign
# bit; a mask leaves one copy.

_UNITS = {"float8_e4m3fn": 2.0**8, "float4_e2m1fn": 2.0**14}


def _from_fp16_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _from_e5m2(codes: jax.Array) -> jax.Array:
    return _from_fp16_bits(codes.astype(jnp.int16) << np.int16(8))


def _from_e4m3fn(codes: jax.Array) -> jax.Array:
    value = _from_fp16_bits((codes.astype(jnp.int16) << np.int16(7)) & np.int16(-0x4001))
    is_nan = (codes & np.int8(0x7F)) == np.int8(0x7F)
    return jnp.where(is_nan, np.float32(np.nan), value)


def _from_high_e2m1fn(pair: jax.Array) -> jax.Array:
    return _from_fp16_bits((pair.astype(jnp.int16) << np.int16(5)) & np.int16(-0x7200))


def _from_low_e2m1fn(pair: jax.Array) -> jax.Array:
    return _from_fp16_bits(((pair.astype(jnp.int16) << np.int16(12)) >> np.int16(3)) & np.int16(-0x7200))


_FROM_BYTES = {"float8_e4m3fn": _from_e4m3fn, "float8_e5m2": _from_e5m2}
