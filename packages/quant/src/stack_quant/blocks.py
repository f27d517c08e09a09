"""Work on a large array, one block after the other, so that what is in between occupies a block's size only.

The loop is Python's. In one compiled program XLA hoists conversions out of a loop, and copies what it runs over.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.tiling import Tiling

__all__ = ["ONE_BLOCK", "Blocks", "blocks", "over_blocks", "repeated"]

T = TypeVar("T")

_FEWEST_ENTRIES = 2**22
_MOST_BLOCKS = 64
_MOST_MORE = 16


@dataclass(frozen=True)
class Blocks:
    """Cuts one axis into `count` equal parts.

    Attributes:
      whole_tiles: whether each tile lies in one block; otherwise every tile has a part in each of them.
    """

    axis: int
    count: int
    whole_tiles: bool


ONE_BLOCK = Blocks(0, 1, whole_tiles=True)


def blocks(tiles: Tiling, axes: Sequence[int]) -> Blocks:
    """Up to about 64 blocks of at least 2**22 entries, along one of `axes`: the outermost that allows as many."""
    wanted = min(_MOST_BLOCKS, math.prod(tiles.shape) // _FEWEST_ENTRIES)
    if wanted < 2 or not axes:
        return ONE_BLOCK
    cuttable = {axis: tiles.scale_shape[axis] if tiles.scale_shape[axis] > 1 else tiles.shape[axis] for axis in axes}
    found = {axis: _count(size, wanted) for axis, size in cuttable.items()}
    axis = next(
        (axis for axis, count in found.items() if count >= wanted), max(found, key=found.__getitem__, default=0)
    )
    if wanted < 2 or found.get(axis, 1) < 2:
        return ONE_BLOCK
    return Blocks(axis, found[axis], whole_tiles=tiles.scale_shape[axis] > 1)


def _count(size: int, wanted: int) -> int:
    """The divisor of `size` that is the least of at least `wanted`, or if that is many more, the largest below."""
    more = range(wanted, min(size, _MOST_MORE * wanted) + 1)
    fewer = range(min(size, wanted), 0, -1)
    return next((count for count in (*more, *fewer) if size % count == 0), 1)


def over_blocks(
    step: Callable[..., jax.Array],
    array: jax.Array,
    others: Sequence[jax.Array | None],
    cut: Blocks,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """What `step(index, block, *others)` returns for each block, joined along the axis that is cut.

    Args:
      step: hashable, since it is compiled once for all that are equal; its result is of a block's shape, or has an
        entry for each of its tiles.
      others: arrays of the rank of `array` are cut with it, unless the axis has size 1; no others are.
      combine: takes the results of two blocks, where each has a part of every tile; a result of zeros changes nothing.
    """
    if cut.count == 1:
        return step(jnp.int32(0), array, *others)
    if cut.whole_tiles:
        combine = None
    struct = jax.eval_shape(functools.partial(_of_block, step, cut), array, tuple(others), np.int32(0))
    shape = list(struct.shape)
    shape[cut.axis] *= cut.count if combine is None else 1
    total = jnp.zeros(shape, struct.dtype)
    for index in range(cut.count):
        # One at a time: several in flight would hold their temporaries together, and programs with collectives may
        # wait for each other for ever on the devices of a CPU (met on jax 0.10.2).
        total = jax.block_until_ready(_add_block(step, cut, combine, array, tuple(others), np.int32(index), total))
    return total


def _of_block(
    step: Callable[..., jax.Array],
    cut: Blocks,
    array: jax.Array,
    others: tuple[jax.Array | None, ...],
    index: jax.Array,
) -> jax.Array:
    def part(operand: jax.Array | None) -> jax.Array | None:
        if operand is None or operand.ndim != array.ndim or operand.shape[cut.axis] == 1:
            return operand
        size = operand.shape[cut.axis] // cut.count
        return lax.dynamic_slice_in_dim(operand, index * size, size, cut.axis)

    return step(index, part(array), *map(part, others))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(6,))
def _add_block(
    step: Callable[..., jax.Array],
    cut: Blocks,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
    array: jax.Array,
    others: tuple[jax.Array | None, ...],
    index: jax.Array,
    total: jax.Array,
) -> jax.Array:
    result = _of_block(step, cut, array, others, index)
    if combine is not None:
        return combine(total, result)
    return lax.dynamic_update_slice_in_dim(total, result, index * result.shape[cut.axis], cut.axis)


def repeated(count: int, body: Callable[[jax.Array, T], T], start: T, cut: Blocks) -> T:
    """`lax.fori_loop` from 0, or Python's loop where there are blocks to go through."""
    if cut.count == 1:
        return lax.fori_loop(0, count, body, start)
    for index in range(count):
        start = body(jnp.int32(index), start)
    return start
