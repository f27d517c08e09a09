"""The range that a tile spans, and the scales and zero points that map it onto the values of a type."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.qtypes import QType
from stack_quant.tiling import spread

__all__ = ["Range", "Scales", "scales"]

_SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)
_LARGEST_BYTE = 255.0


class Range(NamedTuple):
    """What the values of each tile span, float32, of the shape that the scales will have.

    Invariant: `low <= 0 <= high`, so that zero has a code.

    Attributes:
      low: None if the range is symmetric; it is `-high` then.
    """

    low: jax.Array | None
    high: jax.Array


class Scales(NamedTuple):
    """The fields of a `QArray` of these names, and `full`, float32: the scale times its unit."""

    scale: jax.Array
    scale_unit: jax.Array | None
    zero_point: jax.Array | None
    full: jax.Array


def scales(
    span: Range, kind: QType, *, unit_axes: tuple[int, ...] = (), double: bool = False, unbiased: bool = False
) -> Scales:
    """Scales for which the range spans the type.

    A symmetric range is `bound` times the scale on either side. Without a range, as in a tile of zeros, the scale is 1.

    Args:
      unit_axes: the axes along which scales share a unit, where they have one.
      double: float32 scales are stored as multiples of 1/255 of the largest that shares their unit.
      unbiased: nothing within the range is clipped, for rounding that is to keep the mean: the half step beyond the
        largest integer is not used, and scales of few bits are rounded up.
    """
    if span.low is None:
        bound = kind.largest if unbiased else kind.bound
        exact, zero_point = _guarded(span.high / np.float32(bound), span.high), None
    else:
        exact, zero_point = _affine(span.low, span.high, kind, unbiased)
    if kind.scale_dtype == "float8_e8m0fnu":
        full = _power_of_two(exact)
        return Scales(full.astype(kind.scale_dtype), None, zero_point, full)
    if kind.scale_dtype == "float8_e4m3fn":
        return _in_e4m3(exact, unit_axes, unbiased)._replace(zero_point=zero_point)
    if double:
        return _in_bytes(exact, unit_axes, unbiased)._replace(zero_point=zero_point)
    return Scales(exact, None, zero_point, exact)


def _guarded(scale: jax.Array, width: jax.Array) -> jax.Array:
    """No scale is zero or subnormal, which CPUs and TPUs take for zero: the division by it must be finite.

    That of a NaN is NaN, so that compiled programs, which raise nothing, do not hide what went wrong in codes.
    """
    return jnp.where(width <= 0, np.float32(1), jnp.maximum(scale, _SMALLEST_NORMAL))


def _affine(low: jax.Array, high: jax.Array, kind: QType, unbiased: bool) -> tuple[jax.Array, jax.Array]:
    # The zero point is rounded, which moves the range by up to half a step, or by up to one if it is rounded up.
    steps = np.float32(kind.largest - kind.smallest - (1 if unbiased else 0))
    # Halves, since the width of a range may exceed the largest float32.
    width = high * np.float32(0.5) - low * np.float32(0.5)
    scale = _guarded(width / (steps * np.float32(0.5)), width)
    exact = np.float32(kind.smallest) - low / scale
    rounded = jnp.ceil(exact) if unbiased else jnp.round(exact)
    return scale, jnp.clip(rounded, np.float32(kind.smallest), np.float32(kind.largest)).astype(jnp.int8)


def _power_of_two(scale: jax.Array) -> jax.Array:
    """The least power of two that is not below."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    power = lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)
    return jnp.where(power < scale, power * np.float32(2), power)


def _unit(scale: jax.Array, axes: tuple[int, ...], largest: float) -> jax.Array:
    most = jnp.max(scale, axis=axes, keepdims=True)
    return _guarded(most / np.float32(largest), most)


def _in_e4m3(scale: jax.Array, axes: tuple[int, ...], unbiased: bool) -> Scales:
    unit = _unit(scale, axes, 448.0)
    wanted = jnp.minimum(scale / spread(unit, scale.shape), np.float32(448))
    bits = lax.bitcast_convert_type(wanted.astype(jnp.float8_e4m3fn), jnp.uint8)
    if unbiased:
        rounded = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
        bits = bits + (rounded < wanted).astype(jnp.uint8)
    stored = lax.bitcast_convert_type(jnp.maximum(bits, np.uint8(1)), jnp.float8_e4m3fn)
    return Scales(stored, unit, None, stored.astype(jnp.float32) * spread(unit, scale.shape))


def _in_bytes(scale: jax.Array, axes: tuple[int, ...], unbiased: bool) -> Scales:
    unit = _unit(scale, axes, _LARGEST_BYTE)
    wanted = scale / spread(unit, scale.shape)
    rounded = jnp.ceil(wanted) if unbiased else jnp.round(wanted)
    stored = jnp.clip(rounded, np.float32(1), np.float32(_LARGEST_BYTE)).astype(jnp.uint8)
    return Scales(stored, unit, None, stored.astype(jnp.float32) * spread(unit, scale.shape))
