"""Calibration: the range of each tile of an array."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.blocks import ONE_BLOCK, Blocks, over_blocks, repeated
from stack_quant.qtypes import QType
from stack_quant.rounding import snap
from stack_quant.scales import Range, scales
from stack_quant.spec import ArraySpec
from stack_quant.tiling import Tiling

__all__ = ["calibrate", "calibrate_weighted", "half_step_tiles", "shows_all"]

# The factors by which "mse" shrinks the full range: 1, 0.95, ..., 0.2.
_SHRUNKEN = np.linspace(1.0, 0.2, 17, dtype=np.float32)


def calibrate(array: jax.Array, spec: ArraySpec, *, name: str = "", cut: Blocks = ONE_BLOCK) -> Range:
    """Computes the range of each tile of a floating array by `spec.calibration`.

    Args:
      name: name of the array in messages.
      cut: blocks that are processed one after another.
    """
    tiles = spec.tiling(array.shape, name)
    method = spec.calibrated
    match method.name:
        case "fixed":
            low, high = (jnp.full(tiles.scale_shape, end, jnp.float32) for end in method.fixed)
            return Range(None, jnp.maximum(-low, high)) if spec.symmetric else Range(low, high)
        case "rms":
            return _root_mean_square(array, spec, tiles, cut)
        case "percentile":
            return _percentile(array, spec, tiles, cut)
        case "mse":
            return _minimal_error(array, spec, tiles, cut)
        case "moving":
            return _extremes(array, spec, tiles, cut)
    factor = np.float32(method.arguments[0])
    return jax.tree.map(lambda end: end * factor, _extremes(array, spec, tiles, cut))


@functools.partial(jax.jit, static_argnames="spec")
def calibrate_weighted(array: jax.Array, importance: jax.Array, spec: ArraySpec) -> Range:
    """Computes the range of each tile with the smallest squared error weighted by the importance of each entry.

    For "absmax" and "minmax" it is the full range times the best of 31 factors from 1 to 0.4. Other calibrations are
    unchanged.
    """
    widest, tiles, kind = calibrate(array, spec), spec.tiling(array.shape), spec.qtype
    if spec.calibrated.name not in ("absmax", "minmax"):
        return widest
    values, weights = tiles.split(array).astype(jnp.float32), tiles.split(importance)

    def try_factor(place: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        least, chosen = best
        factor = np.float32(1) - np.float32(0.02) * place.astype(jnp.float32)
        span = jax.tree.map(lambda end: end * factor, widest)
        half_step = spec.range_ends == "half_step"
        axes = spec.unit_axes(array.ndim)
        mapped = scales(span, kind, unit_axes=axes, double=spec.double_quantized, half_step=half_step)
        errors = _squared_error(values, tiles, kind, mapped.full, mapped.zero_point)
        error = tiles.join(jnp.sum(errors * weights, axis=tiles.within, keepdims=True))
        return jnp.minimum(error, least), jnp.where(error < least, factor, chosen)

    start = (jnp.full_like(widest.high, jnp.inf), jnp.ones_like(widest.high))
    _, factor = lax.fori_loop(0, 31, try_factor, start)
    return jax.tree.map(lambda end: end * factor, widest)


def half_step_tiles(array: jax.Array, span: Range, spec: ArraySpec, cut: Blocks = ONE_BLOCK) -> bool | jax.Array:
    """Returns for which tiles the ends of the range lie half a step beyond the outermost codes, by `spec.range_ends`.

    The result is one bool for all tiles or, for "fitted", an array with one entry per tile.
    """
    if spec.range_ends != "fitted" or not spec.qtype.is_integer:
        return spec.range_ends == "half_step"
    exact, half = (scales(span, spec.qtype, half_step=half_step) for half_step in (False, True))
    more = _MoreError(spec.qtype, Tiling(array.shape, span.high.shape))
    others = (half.full, half.zero_point, exact.full, exact.zero_point)
    return over_blocks(more, array, others, cut, jnp.add) < 0


def shows_all(spec: ArraySpec) -> bool:
    """Returns whether a NaN or infinite entry of the array always makes its range NaN or infinite."""
    return spec.calibrated.name not in ("fixed", "percentile")


def _extremes(array: jax.Array, spec: ArraySpec, tiles: Tiling, cut: Blocks) -> Range:
    def extreme(side: str, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return over_blocks(_Extreme(side, tiles), array, (), cut, combine).astype(jnp.float32)

    if spec.symmetric:
        return Range(None, extreme("both", jnp.maximum))
    return Range(extreme("below", jnp.minimum), extreme("above", jnp.maximum))


def _root_mean_square(array: jax.Array, spec: ArraySpec, tiles: Tiling, cut: Blocks) -> Range:
    """Computes the "rms" range. Dividing by the largest magnitude of a tile keeps squares from over- or underflow."""
    extremes = _extremes(array, spec, tiles, cut)
    largest = extremes.high if extremes.low is None else jnp.maximum(extremes.high, -extremes.low)
    unit = jnp.where(largest > 0, largest, np.float32(1))
    total = over_blocks(_Squares(tiles), array, (unit,), cut, jnp.add)
    width = unit * jnp.sqrt(total / np.float32(max(tiles.tile_entries, 1))) * np.float32(spec.calibrated.arguments[0])
    if extremes.low is None:
        return Range(None, width)
    return Range(jnp.maximum(extremes.low, -width), jnp.minimum(extremes.high, width))


def _percentile(array: jax.Array, spec: ArraySpec, tiles: Tiling, cut: Blocks) -> Range:
    if spec.symmetric:
        return Range(None, _ranked(array, "both", spec, tiles, cut))
    return Range(-_ranked(array, "below", spec, tiles, cut), _ranked(array, "above", spec, tiles, cut))


def _ranked(array: jax.Array, side: str, spec: ArraySpec, tiles: Tiling, cut: Blocks) -> jax.Array:
    """Computes the given percentile of the magnitudes on one side of zero in each tile.

    The bits of non-negative floats are ordered like the floats. Each pass determines one bit of the result by counting
    smaller entries, starting from the highest bit. Unlike sorting, this needs no extra memory and moves no entries
    between shards.
    """
    word = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    # Without the sign bit, which is 0 in magnitudes.
    bits = 8 * word.itemsize - 1
    rank = np.int32(max(1, math.ceil(tiles.tile_entries * spec.calibrated.arguments[0] / 100)))

    def fix_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (word.type(1) << (bits - 1 - place).astype(word))
        below = over_blocks(_CountBelow(side, tiles), array, (trial,), cut, jnp.add)
        return jnp.where(below < rank, trial, found)

    found = repeated(bits, fix_bit, jnp.zeros(tiles.scale_shape, word), cut)
    return lax.bitcast_convert_type(found, array.dtype).astype(jnp.float32)


def _minimal_error(array: jax.Array, spec: ArraySpec, tiles: Tiling, cut: Blocks) -> Range:
    """Finds the shrunken range with the smallest squared rounding error in each tile ("mse")."""
    widest, kind = _extremes(array, spec, tiles, cut), spec.qtype

    def try_factor(place: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        least, chosen = best
        factor = jnp.asarray(_SHRUNKEN)[place]
        span = jax.tree.map(lambda end: end * factor, widest)
        # Rounded like the final scales, because that rounding is part of the error.
        mapped = scales(span, kind, unit_axes=spec.unit_axes(array.ndim), double=spec.double_quantized)
        error = over_blocks(_SquaredError(kind, tiles), array, (mapped.full, mapped.zero_point), cut, jnp.add)
        return jnp.minimum(error, least), jnp.where(error < least, factor, chosen)

    start = (jnp.full_like(widest.high, jnp.inf), jnp.ones_like(widest.high))
    _, factor = repeated(len(_SHRUNKEN), try_factor, start, cut)
    return jax.tree.map(lambda end: end * factor, widest)


def _magnitudes(entries: jax.Array, side: str) -> jax.Array:
    """Returns the magnitudes of the entries on one side of zero and 0 for entries on the opposite side."""
    if side == "both":
        return jnp.abs(entries)
    return jnp.maximum(entries if side == "above" else -entries, 0)


@dataclass(frozen=True)
class _Extreme:
    """The end of the range on one side.

    It is computed in the array's own dtype: XLA may materialize the result of a conversion before a reduction.
    """

    side: str
    tiles: Tiling

    def __call__(self, index: Any, block: jax.Array) -> jax.Array:
        tiles = self.tiles.of(block)
        entries, most = tiles.split(block), jnp.min if self.side == "below" else jnp.max
        entries = jnp.abs(entries) if self.side == "both" else entries
        # Every range contains zero; the initial value also covers tiles without entries.
        return tiles.join(most(entries, axis=tiles.within, keepdims=True, initial=0))


@dataclass(frozen=True)
class _Squares:
    tiles: Tiling

    def __call__(self, index: Any, block: jax.Array, unit: jax.Array) -> jax.Array:
        tiles = self.tiles.of(block)
        parts = tiles.split(block).astype(jnp.float32) / tiles.split(unit)
        return tiles.join(jnp.sum(jnp.square(parts), axis=tiles.within, keepdims=True))


@dataclass(frozen=True)
class _CountBelow:
    """The number of magnitudes on one side whose bits are smaller than the bits of a trial value."""

    side: str
    tiles: Tiling

    def __call__(self, index: Any, block: jax.Array, trial: jax.Array) -> jax.Array:
        tiles = self.tiles.of(block)
        bits = lax.bitcast_convert_type(_magnitudes(tiles.split(block), self.side), trial.dtype)
        return tiles.join(jnp.sum(bits < tiles.split(trial), axis=tiles.within, keepdims=True, dtype=jnp.int32))


@dataclass(frozen=True)
class _SquaredError:
    """The squared error of rounding each tile."""

    kind: QType
    tiles: Tiling

    def __call__(self, index: Any, block: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
        tiles = self.tiles.of(block)
        error = _squared_error(tiles.split(block), tiles, self.kind, scale, zero_point)
        return tiles.join(jnp.sum(error, axis=tiles.within, keepdims=True))


@dataclass(frozen=True)
class _MoreError:
    """The difference of the squared rounding errors of each tile by two scales, in one pass over the entries."""

    kind: QType
    tiles: Tiling

    def __call__(
        self,
        index: Any,
        block: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array | None,
        other_scale: jax.Array,
        other_zero_point: jax.Array | None,
    ) -> jax.Array:
        tiles = self.tiles.of(block)
        entries = tiles.split(block)
        error = _squared_error(entries, tiles, self.kind, scale, zero_point)
        other = _squared_error(entries, tiles, self.kind, other_scale, other_zero_point)
        return tiles.join(jnp.sum(error - other, axis=tiles.within, keepdims=True))


def _squared_error(
    entries: jax.Array, tiles: Tiling, kind: QType, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    values, scale = entries.astype(jnp.float32), tiles.split(scale)
    if zero_point is None:
        # Symmetric codes omit the least integer, as in `quantize_array`.
        return jnp.square(snap(values / scale, kind, smallest=-kind.largest) * scale - values)
    zero = tiles.split(zero_point).astype(jnp.float32)
    return jnp.square((snap(values / scale + zero, kind) - zero) * scale - values)
