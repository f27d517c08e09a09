"""The range that a tile spans, and the scales and zero points that map it onto the values of a type."""

from typing import Any, NamedTuple

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
    span: Range,
    kind: QType,
    *,
    unit_axes: tuple[int, ...] = (),
    double: bool = False,
    half_step: bool | jax.Array = False,
    unbiased: bool = False,
) -> Scales:
    """Computes the scales that map each range onto the type: a symmetric one onto -largest to largest.

    A range of zero, as of a tile of zeros, has the scale 1.

    Args:
      unit_axes: the axes along which scales share a unit, where they have one.
      double: float32 scales are stored as multiples of 1/255 of the largest that shares their unit.
      half_step: whether the ends of the range lie half a step beyond the outermost integers, to which they still round,
        for a finer step; also one entry a tile. Other types have no such step.
      unbiased: scales of few bits are rounded up, so that nothing within the range is clipped.
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


def _guarded(scale: jax.Array, width: jax.Array) -> jax.Array:
    """No scale is zero or subnormal, which CPUs and TPUs take for zero: the division by it must be finite.

    That of a NaN is NaN, so that compiled programs, which raise nothing, do not hide what went wrong in codes.
    """
    return jnp.where(width <= 0, np.float32(1), jnp.maximum(scale, _SMALLEST_NORMAL))


def _as_float(condition: bool | jax.Array) -> Any:
    return condition.astype(jnp.float32) if isinstance(condition, jax.Array) else np.float32(condition)


def _affine(low: jax.Array, high: jax.Array, kind: QType, half_step: bool | jax.Array) -> tuple[jax.Array, jax.Array]:
    # The zero point is rounded, which moves the range by up to half a step, or by up to one if it is rounded up.
    steps = np.float32(kind.largest - kind.smallest - 1) + _as_float(half_step)
    # Halves, since the width of a range may exceed the largest float32.
    width = high * np.float32(0.5) - low * np.float32(0.5)
    scale = _guarded(width / (steps * np.float32(0.5)), width)
    exact = np.float32(kind.smallest) - low / scale
    rounded = jnp.where(half_step, jnp.round(exact), jnp.ceil(exact))
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
