"""Finds the range of an array, tile by tile."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.rounding import snap
from stack_quant.scales import Range, scales
from stack_quant.spec import ArraySpec
from stack_quant.tiling import Tiling

__all__ = ["calibrate"]

_SHRUNKEN = np.linspace(1.0, 0.2, 33, dtype=np.float32)


def calibrate(array: jax.Array, spec: ArraySpec, *, name: str = "") -> Range:
    """The range of each tile of a floating array, found as `spec.calibration` says.

    Args:
      name: of the array, for messages.
    """
    tiles = spec.tiling(array.shape, name)
    method = spec.calibrated
    match method.name:
        case "fixed":
            low, high = (jnp.full(tiles.scale_shape, end, jnp.float32) for end in method.fixed)
            return Range(None, jnp.maximum(-low, high)) if spec.symmetric else Range(low, high)
        case "rms":
            return _root_mean_square(array, spec, tiles, method.arguments[0])
        case "percentile":
            return _percentile(array, spec, tiles, method.arguments[0])
        case "mse":
            return _least_error(array, spec, tiles)
        case "moving":
            return _extremes(array, spec, tiles)
    factor = np.float32(method.arguments[0])
    return jax.tree.map(lambda end: end * factor, _extremes(array, spec, tiles))


def _extremes(array: jax.Array, spec: ArraySpec, tiles: Tiling) -> Range:
    # In the array's own dtype, exactly: a conversion before two reductions would be written down.
    split = tiles.split(array)
    if spec.symmetric:
        return Range(None, _reduced(jnp.max, jnp.abs(split), tiles))
    low, high = _reduced(jnp.min, split, tiles), _reduced(jnp.max, split, tiles)
    return Range(jnp.minimum(low, np.float32(0)), jnp.maximum(high, np.float32(0)))


def _reduced(reduce: Callable[..., jax.Array], split: jax.Array, tiles: Tiling) -> jax.Array:
    return tiles.join(reduce(split, axis=tiles.within, keepdims=True, initial=0)).astype(jnp.float32)


def _root_mean_square(array: jax.Array, spec: ArraySpec, tiles: Tiling, factor: float) -> Range:
    """Of the array over its largest magnitude, so that no square overflows or vanishes."""
    extremes = _extremes(array, spec, tiles)
    largest = extremes.high if extremes.low is None else jnp.maximum(extremes.high, -extremes.low)
    unit = jnp.where(largest > 0, largest, np.float32(1))
    squares = jnp.square(tiles.split(array).astype(jnp.float32) / tiles.split(unit))
    mean = tiles.join(jnp.mean(squares, axis=tiles.within, keepdims=True))
    width = unit * jnp.sqrt(mean) * np.float32(factor)
    if extremes.low is None:
        return Range(None, width)
    return Range(jnp.maximum(extremes.low, -width), jnp.minimum(extremes.high, width))


def _percentile(array: jax.Array, spec: ArraySpec, tiles: Tiling, percent: float) -> Range:
    split = tiles.split(array)
    if spec.symmetric:
        return Range(None, _ranked(jnp.abs(split), tiles, percent))
    above, below = (jnp.maximum(side, 0) for side in (split, -split))
    return Range(-_ranked(below, tiles, percent), _ranked(above, tiles, percent))


def _ranked(split: jax.Array, tiles: Tiling, percent: float) -> jax.Array:
    """The least entry of each tile that `percent` of its entries do not exceed; all entries are at least 0.

    Bits of such floats are in the order of the floats. Each pass fixes one bit of the result, from the highest on, by
    counting; unlike a sort that needs no memory, and sharded entries stay where they are.
    """
    width = 8 * split.dtype.itemsize
    word = jnp.dtype(f"uint{width}")
    bits = lax.bitcast_convert_type(split, word)
    rank = np.int32(max(1, -(-tiles.tile_entries * percent // 100)))
    found = jnp.zeros([count if place % 2 == 0 else 1 for place, count in enumerate(split.shape)], word)

    def fix_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (word.type(1) << (width - 2 - place).astype(word))
        below = jnp.sum(bits < trial, axis=tiles.within, keepdims=True, dtype=jnp.int32)
        return jnp.where(below < rank, trial, found)

    found = lax.fori_loop(0, width - 1, fix_bit, found)
    return tiles.join(lax.bitcast_convert_type(found, split.dtype)).astype(jnp.float32)


def _least_error(array: jax.Array, spec: ArraySpec, tiles: Tiling) -> Range:
    widest, split = _extremes(array, spec, tiles), tiles.split(array)

    def squared_error(span: Range) -> jax.Array:
        mapped = scales(span, spec.qtype, unit_axes=spec.unit_axes(array.ndim), double=spec.double_quantized)
        scale = tiles.split(mapped.full)
        zero = np.float32(0) if mapped.zero_point is None else tiles.split(mapped.zero_point.astype(jnp.float32))
        values = split.astype(jnp.float32)
        error = (snap(values / scale + zero, spec.qtype) - zero) * scale - values
        return tiles.join(jnp.sum(jnp.square(error), axis=tiles.within, keepdims=True))

    def try_factor(best: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        least, chosen = best
        error = squared_error(jax.tree.map(lambda end: end * factor, widest))
        return (jnp.minimum(error, least), jnp.where(error < least, factor, chosen)), None

    start = (jnp.full_like(widest.high, jnp.inf), jnp.ones_like(widest.high))
    (_, factor), _ = lax.scan(try_factor, start, jnp.asarray(_SHRUNKEN))
    return jax.tree.map(lambda end: end * factor, widest)
