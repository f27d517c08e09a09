"""Rounding of values to codes: to the nearest, or stochastically."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.qtypes import QType

__all__ = ["as_codes", "encode", "snap"]

# float32 numbers of this size are 1 apart. Adding it to a value of magnitude up to 2**22 rounds the value to the
# nearest integer, ties to even, which is then in the lowest bits of the sum.
_UNIT_STEP = np.float32(1.5 * 2**23)
_FLOAT32_EXPONENT = np.uint32(0x7F800000)


def encode(values: jax.Array, kind: QType, *, key: jax.Array | None = None, smallest: float | None = None) -> jax.Array:
    """Rounds scaled float32 values to codes, one per byte. Values out of range saturate.

    The result is uint8 with the bits of a floating type, else int8; `as_codes` converts it to the code dtype.

    Without a key, each value is rounded to the nearest code, ties to the even integer or mantissa. With a key, a value
    x between neighbours a < b becomes b with probability (x - a) / (b - a), else a.

    Args:
      smallest: smallest code of the result; by default the smallest of the type.
    """
    if kind.codebook is not None:
        passed = [one.astype(jnp.int8) for one in _passed(values, kind.codebook, key)]
        return functools.reduce(jnp.add, passed)
    if kind.is_integer:
        return _small_integers(snap(values, kind, key=key, smallest=smallest))
    return _float_codes(_clipped(values, kind) if key is None else snap(values, kind, key=key), kind)


def as_codes(encoded: jax.Array, kind: QType) -> jax.Array:
    """Converts the result of `encode` to dtype `kind.code_dtype`."""
    if kind.codebook is not None or kind.is_integer:
        return encoded.astype(kind.code_dtype)
    return lax.bitcast_convert_type(encoded.astype(f"uint{kind.bits}"), kind.code_dtype)


def snap(values: jax.Array, kind: QType, *, key: jax.Array | None = None, smallest: float | None = None) -> jax.Array:
    """Rounds to the float32 values of the codes of `encode`."""
    if kind.codebook is not None:
        gaps = np.diff(np.asarray(kind.codebook, np.float32))
        passed = _passed(values, kind.codebook, key)
        steps = [jnp.where(one, gap, np.float32(0)) for one, gap in zip(passed, gaps, strict=True)]
        return functools.reduce(jnp.add, steps, jnp.full_like(values, kind.smallest))
    values = _clipped(values, kind, smallest)
    if kind.is_integer:
        return _round(values, key)
    step = _float_step(values, kind)
    return _round(values / step, key) * step


def _clipped(values: jax.Array, kind: QType, smallest: float | None = None) -> jax.Array:
    return jnp.clip(values, np.float32(kind.smallest if smallest is None else smallest), np.float32(kind.largest))


def _round(values: jax.Array, key: jax.Array | None) -> jax.Array:
    if key is None:
        return jnp.round(values)
    # The fraction of a float32 is exact, so it is compared; floor(value + random) would round the sum first.
    below = jnp.floor(values)
    return below + (jax.random.uniform(key, values.shape, jnp.float32) < values - below).astype(jnp.float32)


def _small_integers(rounded: jax.Array) -> jax.Array:
    """Converts integral float32 numbers to int8: the lowest byte of a sum whose last bit is worth 1.

    XLA's conversion also checks for NaN and out-of-range values, which makes quantization on CPUs a tenth slower.
    """
    return lax.bitcast_convert_type(rounded + _UNIT_STEP, jnp.int32).astype(jnp.int8)


def _float_codes(values: jax.Array, kind: QType) -> jax.Array:
    """Rounds values within the range of a floating type to the bits of the nearest code, ties to even.

    Codes increase with the magnitudes that they represent. A code is the magnitude in steps, plus the number of codes
    of a binade for each doubling of the step. A dtype conversion rounds in the same way, but XLA removes it if the
    inverse conversion follows (on GPUs, jax 0.11.2), and on CPUs it takes twice as long.
    """
    limits = jnp.finfo(kind.code_dtype)
    smallest_step = np.float32(2.0 ** (limits.minexp - limits.nmant)).view(np.uint32)
    step = _float_step(values, kind)
    # Scaled by the step, the sum below rounds to a multiple of the step, ties to even.
    unit = step * _UNIT_STEP
    steps = _bits(jnp.abs(values) + unit) - _bits(unit)
    # The difference of exponents, times the 2**nmant codes of a binade.
    doubled = (_bits(step) - smallest_step) >> np.uint32(23 - limits.nmant)
    sign = np.uint32(2 ** (kind.bits - 1))
    code = jnp.minimum(steps + doubled, sign - np.uint32(1))  # NaN has the largest exponent and becomes the NaN code
    code = code | _bits(values) >> np.uint32(32 - kind.bits) & sign
    return code.astype(jnp.uint8)


def _float_step(values: jax.Array, kind: QType) -> jax.Array:
    """Returns the distance of neighbouring numbers of a floating type around each value, a power of two."""
    limits = jnp.finfo(kind.code_dtype)
    power = lax.bitcast_convert_type(_bits(values) & _FLOAT32_EXPONENT, jnp.float32)
    # Below the smallest normal number the codes are subnormal and evenly spaced.
    return jnp.maximum(power, np.float32(2.0**limits.minexp)) * np.float32(2.0**-limits.nmant)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint32)


def _passed(values: jax.Array, codebook: tuple[float, ...], key: jax.Array | None) -> list[jax.Array]:
    """Returns for each gap between levels whether a value is past its middle or, with a key, past a random point.

    The number of passed gaps is the code.
    """
    levels = np.asarray(codebook, np.float32)
    part = np.float32(0.5) if key is None else jax.random.uniform(key, values.shape, jnp.float32)
    return [values - low > part * (high - low) for low, high in itertools.pairwise(levels)]
