"""How an array is cut into the tiles that share a scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ArgumentError, ShapeError

__all__ = ["Tiling", "spread", "tile_sizes", "tiling"]


@dataclass(frozen=True)
class Tiling:
    """An array's shape over the tiles that share a scale.

    Each axis of `shape` that is cut becomes two, `(tiles, entries of a tile)`; reductions go over the axes `within`. No
    axis of size 1 is added: XLA's CPU backend writes down what it reduces where there is one beside a cut axis.

    Invariants: `shape[i] % scale_shape[i] == 0`.
    """

    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]

    @property
    def cut(self) -> tuple[bool, ...]:
        """Of each axis, whether it has several tiles of several entries."""
        return tuple(1 < count < size for size, count in zip(self.shape, self.scale_shape, strict=True))

    @property
    def within(self) -> tuple[int, ...]:
        """The axes of a split array that lie within a tile."""
        pairs = zip(self.shape, self.scale_shape, strict=True)
        return tuple(axis + sum(self.cut[: axis + 1]) for axis, (size, count) in enumerate(pairs) if count < size)

    @property
    def tile_entries(self) -> int:
        """How many entries share a scale."""
        return math.prod(self.shape) // max(math.prod(self.scale_shape), 1)

    def of(self, block: jax.Array) -> "Tiling":
        """The same tiles of a block of the array: of whole tiles along an axis, or of a part of all."""
        pairs = zip(block.shape, self.shape, self.scale_shape, strict=True)
        return Tiling(block.shape, tuple(count if count <= 1 else count * size // full for size, full, count in pairs))

    def split(self, array: jax.Array) -> jax.Array:
        """`array` of shape `shape`, or one entry for each tile, in two axes for each that is cut."""
        axes = zip(array.shape, self.scale_shape, self.cut, strict=True)
        return array.reshape(
            [part for size, count, cut in axes for part in ((count, size // count) if cut else (size,))]
        )

    def join(self, array: jax.Array) -> jax.Array:
        """The inverse of `split`, from a split array or from what a reduction `within` left of one."""
        sizes = iter(array.shape)
        return array.reshape([next(sizes) * next(sizes) if cut else next(sizes) for cut in self.cut])


def tiling(shape: Sequence[int], channel_axes: Sequence[int], tiles: Mapping[int, int], name: str = "") -> Tiling:
    """Cuts axes in `tiles` into tiles of that many entries, `channel_axes` into single ones, no others at all.

    Raises:
      ArgumentError: an axis that the shape does not have, or one that is given twice.
      ShapeError: a tile that does not divide its axis; both sizes are named, and the nearest that would do.
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
    scale_shape = tuple(size // sizes[axis] if axis in sizes else min(size, 1) for axis, size in enumerate(shape))
    return Tiling(tuple(shape), scale_shape)


def tile_sizes(entries: int, wanted: int) -> list[int]:
    """The tiles that divide so many entries, the best first: `wanted`, smaller ones down to an eighth, larger ones."""
    divisors = [size for size in range(1, entries + 1) if entries % size == 0]
    smaller = [size for size in reversed(divisors) if size <= wanted]
    fine = [size for size in smaller if 8 * size >= min(wanted, entries)]
    larger = [size for size in divisors if size > wanted]
    return [*fine, *larger, *smaller[len(fine) :]]


def _axis(axis: int, shape: Sequence[int], what: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{what}axis {axis} is none of an array of shape {tuple(shape)}.")
    return axis % len(shape)


def _tile(size: int, tile: int, axis: int, what: str) -> int:
    if tile < 1 or size % tile:
        divisors = (divisor for divisor in range(1, size + 1) if size % divisor == 0)
        near = min(divisors, key=lambda divisor: abs(divisor - tile), default=1)
        raise ShapeError(
            f"{what}a tile of {tile} does not divide axis {axis}, of size {size}. "
            f"Choose one that does, such as {near}, or pad the axis to {-(-size // max(tile, 1)) * max(tile, 1)}."
        )
    return tile


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`scale`, whose axes divide `shape`, each entry repeated over what it covers; an axis of 1 broadcasts."""
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    return scale
