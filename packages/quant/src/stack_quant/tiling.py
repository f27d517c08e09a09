"""Tiles of an array, whose entries share a scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ArgumentError, ShapeError

__all__ = ["Tiling", "spread", "tile_sizes", "tiling"]


@dataclass(frozen=True)
class Tiling:
    """The tiles of an array.

    `split` replaces each axis that has several tiles of several entries by two, `(tiles, entries of a tile)`.
    Reductions over a tile are over the axes `within`. No axis of size 1 is added: next to a split axis it makes XLA's
    CPU backend materialize the input of a reduction.

    Invariants: `shape[i] % scale_shape[i] == 0`.

    Attributes:
      shape: shape of the array.
      scale_shape: number of tiles along each axis.
    """

    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]

    @property
    def cut(self) -> tuple[bool, ...]:
        """For each axis, whether it is split because it has several tiles of several entries."""
        return tuple(1 < count < size for size, count in zip(self.shape, self.scale_shape, strict=True))

    @property
    def within(self) -> tuple[int, ...]:
        """The axes of a split array that lie within a tile."""
        pairs = zip(self.shape, self.scale_shape, strict=True)
        return tuple(axis + sum(self.cut[: axis + 1]) for axis, (size, count) in enumerate(pairs) if count < size)

    @property
    def tile_entries(self) -> int:
        """Number of entries that share a scale."""
        return math.prod(self.shape) // max(math.prod(self.scale_shape), 1)

    def of(self, block: jax.Array) -> "Tiling":
        """Returns the tiling of a block of the array, which holds complete tiles of an axis or a part of every tile."""
        pairs = zip(block.shape, self.shape, self.scale_shape, strict=True)
        return Tiling(block.shape, tuple(count if count <= 1 else count * size // full for size, full, count in pairs))

    def split(self, array: jax.Array) -> jax.Array:
        """Splits the axes of an array that has shape `shape`, or one entry per tile."""
        axes = zip(array.shape, self.scale_shape, self.cut, strict=True)
        return array.reshape(
            [part for size, count, cut in axes for part in ((count, size // count) if cut else (size,))]
        )

    def join(self, array: jax.Array) -> jax.Array:
        """Joins split axes: the inverse of `split`, also after a reduction over `within`."""
        sizes = iter(array.shape)
        return array.reshape([next(sizes) * next(sizes) if cut else next(sizes) for cut in self.cut])


def tiling(shape: Sequence[int], channel_axes: Sequence[int], tiles: Mapping[int, int], name: str = "") -> Tiling:
    """Divides a shape into tiles.

    Args:
      channel_axes: axes with tiles of one entry.
      tiles: entries of a tile, by axis. Any remaining axis has one tile.
      name: name of the array in messages.

    Raises:
      ArgumentError: an axis does not exist, or occurs twice.
      ShapeError: a tile does not divide its axis; the message has both sizes and the nearest divisor.
    """
    what = f"{name}: " if name else ""
    sizes = {_axis(axis, shape, what): 1 for axis in channel_axes}
    for axis, tile in tiles.items():
        position = _axis(axis, shape, what)
        if position in sizes:
            raise ArgumentError(
                f"{what}axis {position} is given twice, among channel axes and tiles. Keep one of them."
            )
        sizes[position] = _tile(shape[position], tile, position, what)
    # An empty axis has 0 tiles and not 1.
    scale_shape = tuple(size // sizes[axis] if axis in sizes else min(size, 1) for axis, size in enumerate(shape))
    return Tiling(tuple(shape), scale_shape)


def tile_sizes(entries: int, preferred: int) -> list[int]:
    """Returns the divisors of `entries`: `preferred`, then smaller ones down to an eighth, then larger ones.

    Divisors smaller than an eighth come last.
    """
    divisors = [size for size in range(1, entries + 1) if entries % size == 0]
    smaller = [size for size in reversed(divisors) if size <= preferred]
    # Much smaller tiles would store more scales than a rule asks for, so larger ones come first.
    fine = [size for size in smaller if 8 * size >= min(preferred, entries)]
    larger = [size for size in divisors if size > preferred]
    return [*fine, *larger, *smaller[len(fine) :]]


def _axis(axis: int, shape: Sequence[int], prefix: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{prefix}axis {axis} does not exist in an array of shape {tuple(shape)}.")
    return axis % len(shape)


def _tile(size: int, tile: int, axis: int, prefix: str) -> int:
    if tile < 1 or size % tile:
        divisors = (divisor for divisor in range(1, size + 1) if size % divisor == 0)
        near = min(divisors, key=lambda divisor: abs(divisor - tile), default=1)
        raise ShapeError(
            f"{prefix}a tile of {tile} does not divide axis {axis}, of size {size}. "
            f"Choose one that does, such as {near}, or pad the axis to {-(-size // max(tile, 1)) * max(tile, 1)}."
        )
    return tile


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the entries of `scale`, whose axes divide `shape`, over their tiles. Axes of size 1 stay."""
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    return scale
