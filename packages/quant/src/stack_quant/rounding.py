"""Values to codes: to the nearest, or to either neighbour with the probability that keeps the mean."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.qtypes import QType

__all__ = ["as_codes", "encode", "snap"]

_UNIT_STEP = np.float32(1.5 * 2**23)  # neighbouring float32 of this size differ by 1
_FLOAT32_EXPONENT = np.uint32(0x7F800000)


def encode(values: jax.Array, kind: QType, *, key: jax.Array | None = None, smallest: float | None = None) -> jax.Array:
    """Codes, each in a byte, of float32 values that are scaled already; what is out of range saturates.

    `as_codes` makes them of their dtype: uint8 holds the bits of a floating type, int8 any other code.

    Without a key each value is rounded to the nearest, ties to the even integer or mantissa. With one, a value x
    between neighbours a < b becomes b with probability (x - a) / (b - a), else a.

    Args:
      smallest: the least code that is given; by default the type's.
    """
    if kind.codebook is not None:
        passed = [one.astype(jnp.int8) for one in _passed(values, kind.codebook, key)]
        return functools.reduce(jnp.add, passed)
    if kind.is_integer:
        return _small_integers(snap(values, kind, key=key, smallest=smallest))
    return _float_codes(_clipped(values, kind) if key is None else snap(values, kind, key=key), kind)


def as_codes(encoded: jax.Array, kind: QType) -> jax.Array:
    """What `encode` gives, of dtype `kind.code_dtype`."""
    if kind.codebook is not None or kind.is_integer:
        return encoded.astype(kind.code_dtype)
    return lax.bitcast_convert_type(encoded.astype(f"uint{kind.bits}"), kind.code_dtype)


def snap(values: jax.Array, kind: QType, *, key: jax.Array | None = None, smallest: float | None = None) -> jax.Array:
    """The float32 values of the codes that `encode` gives."""
    if kind.codebook is not None:
        gaps = np.diff(np.asarray(kind.codebook, np.float32))
        passed = _passed(values, kind.codebook, key)
        steps = [jnp.where(one, gap, np.float32(0)) for one, gap in zip(passed, gaps, strict=True)]
        return functools.reduce(jnp.add, steps, jnp.full_like(values, kind.smallest))
    values = _clipped(values, kind, smallest)
    if kind.is_integer:
        return _whole(values, key)
    step = _float_step(values, kind)
    return _whole(values / step, key) * step


def _clipped(values: jax.Array, kind: QType, smallest: float | None = None) -> jax.Array:
    return jnp.clip(values, np.float32(kind.smallest if smallest is None else smallest), np.float32(kind.largest))


def _whole(values: jax.Array, key: jax.Array | None) -> jax.Array:
    if key is None:
        return jnp.round(values)
    # The fraction of a float32 is exact; the sum of the value and a random number would be rounded again.
    below = jnp.floor(values)
    return below + (jax.random.uniform(key, values.shape, jnp.float32) < values - below).astype(jnp.float32)


def _small_integers(whole: jax.Array) -> jax.Array:
    """int8 of float32 that are whole already: the lowest byte of a sum whose last bit is worth 1.

    XLA converts with comparisons, for what is out of range or NaN, that quantizing on CPUs takes a tenth longer for.
    """
    return lax.bitcast_convert_type(whole + _UNIT_STEP, jnp.int32).astype(jnp.int8)


def _float_codes(values: jax.Array, kind: QType) -> jax.Array:
    """The bits of the codes of a floating type nearest to what lies within its range, ties to even.

    Codes are in the order of the magnitudes that they stand for, one step apart: the code is the number of steps in a
    magnitude, and as many again as a binade has for each time that the step has doubled. A conversion would round
    alike, but XLA leaves it out where one back follows (for GPUs, jax 0.11.2), and on CPUs it takes twice as long.
    """
    limits = jnp.finfo(kind.code_dtype)
    smallest_step = np.float32(2.0 ** (limits.minexp - limits.nmant)).view(np.uint32)
    step = _float_step(values, kind)
    unit = step * _UNIT_STEP
    steps = _bits(jnp.abs(values) + unit) - _bits(unit)
    doubled = (_bits(step) - smallest_step) >> np.uint32(23 - limits.nmant)
    sign = np.uint32(2 ** (kind.bits - 1))
    code = jnp.minimum(steps + doubled, sign - np.uint32(1))  # NaN, whose exponent is beyond all, is the last: NaN
    code = code | _bits(values) >> np.uint32(32 - kind.bits) & sign
    return code.astype(jnp.uint8)


def _float_step(values: jax.Array, kind: QType) -> jax.Array:
    """The distance between the numbers of a floating type next to each value: a power of two."""
    limits = jnp.finfo(kind.code_dtype)
    power = lax.bitcast_convert_type(_bits(values) & _FLOAT32_EXPONENT, jnp.float32)
    return jnp.maximum(power, np.float32(2.0**limits.minexp)) * np.float32(2.0**-limits.nmant)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint32)


def _passed(values: jax.Array, codebook: tuple[float, ...], key: jax.Array | None) -> list[jax.Array]:
    """Which gaps between levels a value has passed: more than half of each or, with a key, a random part."""
    levels = np.asarray(codebook, np.float32)
    part = np.float32(0.5) if key is None else jax.random.uniform(key, values.shape, jnp.float32)
    return [values - low > part * (high - low) for low, high in itertools.pairwise(levels)]
