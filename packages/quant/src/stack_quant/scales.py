"""Ranges of tiles, and the scales and zero points that map them onto a type."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.qtypes import QType
from stack_quant.tiling import spread

__all__ = ["Range", "Scales", "rescaled", "scales"]

_SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)
_LARGEST_BYTE = 255.0


class Range(NamedTuple):
    """The range of the values of each tile, in float32 and of the shape of the scales.

    Invariant: `low <= 0 <= high`, which gives zero a code.

    Attributes:
      low: lower ends; None for a symmetric range, from `-high` to `high`.
      high: upper ends.
    """

    low: jax.Array | None
    high: jax.Array


class Scales(NamedTuple):
    """The scales of a `QArray`, with the names of its fields.

    Attributes:
      scale, scale_unit, zero_point: see `QArray`.
      full: float32, the scale times its unit.
    """

    scale: jax.Array
    scale_unit: jax.Array | None
    zero_point: jax.Array | None
    full: jax.Array


def scales(
    span: Range,
    kind: QType,
    *,
    unit_axes: tuple[int, ...] = (),
    double: bool = False,
    half_step: bool | jax.Array = False,
    unbiased: bool = False,
) -> Scales:
    """Computes the scales that map each range onto the type. A symmetric range is mapped onto -largest to largest.

    An empty range, as of a tile of zeros, has scale 1.

    Args:
      unit_axes: axes along which scales share a unit, for types with a unit.
      double: store float32 scales as multiples of 1/255 of the largest scale with the same unit.
      half_step: True places the ends of the range half a step beyond the outermost integers, to which they still
        round. This makes the step finer. One bool for all tiles or one per tile; ignored for types other than integers.
      unbiased: round scales of few bits up, so nothing within the range is clipped.
    """
    half_step = half_step if kind.is_integer else False
    if span.low is None:
        bound = np.float32(kind.largest) + np.float32(0.5) * _as_float(half_step)
        exact, zero_point = _guarded(span.high / bound, span.high), None
    else:
        exact, zero_point = _affine(span.low, span.high, kind, half_step)
    if kind.scale_dtype == "float8_e8m0fnu":
        full = _power_of_two(exact)
        return Scales(full.astype(kind.scale_dtype), None, zero_point, full)
    if kind.scale_dtype == "float8_e4m3fn":
        return _in_e4m3(exact, unit_axes, unbiased)._replace(zero_point=zero_point)
    if double:
        return _in_bytes(exact, unit_axes, unbiased)._replace(zero_point=zero_point)
    return Scales(exact, None, zero_point, exact)


def rescaled(mapped: Scales, ratio: jax.Array, *, unit_axes: tuple[int, ...] = (), double: bool = False) -> Scales:
    """Multiplies float32 or 8-bit scales by positive factors, and keeps the zero points.

    Args:
      unit_axes, double: see `scales`.
    """
    full = mapped.full * ratio
    if double:
        return _in_bytes(full, unit_axes, unbiased=False)._replace(zero_point=mapped.zero_point)
    return mapped._replace(scale=full, full=full)


def _guarded(scale: jax.Array, width: jax.Array) -> jax.Array:
    """Makes scales safe to divide by: 1 for an empty range, else at least the smallest normal number.

    CPUs and TPUs treat subnormal numbers as zero. The scale of a NaN range stays NaN: compiled programs cannot raise an
    error, and codes with a finite scale would hide the NaN.
    """
    return jnp.where(width <= 0, np.float32(1), jnp.maximum(scale, _SMALLEST_NORMAL))


def _as_float(condition: bool | jax.Array) -> Any:
    return condition.astype(jnp.float32) if isinstance(condition, jax.Array) else np.float32(condition)


def _affine(low: jax.Array, high: jax.Array, kind: QType, half_step: bool | jax.Array) -> tuple[jax.Array, jax.Array]:
    # Rounding the zero point up moves the range by up to one step, so the range spans one step less than the codes.
    # With `half_step`, rounding to the nearest moves it by up to half a step, and its ends may lie that far outside.
    steps = np.float32(kind.largest - kind.smallest - 1) + _as_float(half_step)
    # Halved, as the width of a range may exceed the largest float32.
    width = high * np.float32(0.5) - low * np.float32(0.5)
    scale = _guarded(width / (steps * np.float32(0.5)), width)
    exact = np.float32(kind.smallest) - low / scale
    rounded = jnp.where(half_step, jnp.round(exact), jnp.ceil(exact))
    return scale, jnp.clip(rounded, np.float32(kind.smallest), np.float32(kind.largest)).astype(jnp.int8)


def _power_of_two(scale: jax.Array) -> jax.Array:
    """Rounds scales up to powers of two."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    power = lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)
    # Upwards, so the largest entry of a tile is not clipped.
    return jnp.where(power < scale, power * np.float32(2), power)


def _unit(scale: jax.Array, axes: tuple[int, ...], largest: float) -> jax.Array:
    most = jnp.max(scale, axis=axes, keepdims=True)
    return _guarded(most / np.float32(largest), most)


def _in_e4m3(scale: jax.Array, axes: tuple[int, ...], unbiased: bool) -> Scales:
    unit = _unit(scale, axes, 448.0)
    # Rounding may lift the quotient above 448, which converts to NaN.
    wanted = jnp.minimum(scale / spread(unit, scale.shape), np.float32(448))
    bits = lax.bitcast_convert_type(wanted.astype(jnp.float8_e4m3fn), jnp.uint8)
    if unbiased:
        # Incrementing the bits of a positive float gives the next larger one.
        rounded = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
        bits = bits + (rounded < wanted).astype(jnp.uint8)
    # Bits of at least 1, because a scale of 0 would erase its tile.
    stored = lax.bitcast_convert_type(jnp.maximum(bits, np.uint8(1)), jnp.float8_e4m3fn)
    return Scales(stored, unit, None, stored.astype(jnp.float32) * spread(unit, scale.shape))


def _in_bytes(scale: jax.Array, axes: tuple[int, ...], unbiased: bool) -> Scales:
    unit = _unit(scale, axes, _LARGEST_BYTE)
    wanted = scale / spread(unit, scale.shape)
    rounded = jnp.ceil(wanted) if unbiased else jnp.round(wanted)
    # A scale of 0 would erase its tile.
    stored = jnp.clip(rounded, np.float32(1), np.float32(_LARGEST_BYTE)).astype(jnp.uint8)
    return Scales(stored, unit, None, stored.astype(jnp.float32) * spread(unit, scale.shape))
