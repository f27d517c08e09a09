"""Processing of a large array in blocks, which limits intermediate results to the memory of one block.

The loop runs in Python. In a compiled loop, XLA hoists conversions out of the loop and copies the array.
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
    """A division of one axis into equal blocks.

    Attributes:
      axis: axis that is divided.
      count: number of blocks.
      whole_tiles: True if each tile lies within one block; False if every block has a part of every tile.
    """

    axis: int
    count: int
    whole_tiles: bool


ONE_BLOCK = Blocks(0, 1, whole_tiles=True)


def blocks(tiles: Tiling, axes: Sequence[int]) -> Blocks:
    """Chooses up to about 64 blocks of at least 2**22 entries, along the outermost of `axes` that allows this many."""
    wanted = min(_MOST_BLOCKS, math.prod(tiles.shape) // _FEWEST_ENTRIES)
    if wanted < 2 or not axes:
        return ONE_BLOCK
    # An axis of several tiles is divided between tiles, so each tile lies in one block.
    cuttable = {axis: tiles.scale_shape[axis] if tiles.scale_shape[axis] > 1 else tiles.shape[axis] for axis in axes}
    found = {axis: _count(size, wanted) for axis, size in cuttable.items()}
    axis = next(
        (axis for axis, count in found.items() if count >= wanted), max(found, key=found.__getitem__, default=0)
    )
    if wanted < 2 or found.get(axis, 1) < 2:
        return ONE_BLOCK
    return Blocks(axis, found[axis], whole_tiles=tiles.scale_shape[axis] > 1)


def _count(size: int, minimum: int) -> int:
    """Returns the smallest divisor of `size` from `minimum` to 16 times `minimum`, else the largest one below."""
    more = range(minimum, min(size, _MOST_MORE * minimum) + 1)
    fewer = range(min(size, minimum), 0, -1)
    return next((count for count in (*more, *fewer) if size % count == 0), 1)


def over_blocks(
    step: Callable[..., jax.Array],
    array: jax.Array,
    operands: Sequence[jax.Array | None],
    cut: Blocks,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Computes `step(index, block, *others)` for each block and joins the results along the divided axis.

    Args:
      step: hashable function, compiled once for all equal ones. Its result has the shape of a block, or one entry for
        each of the block's tiles.
      operands: further operands. Arrays of the rank of `array` are divided like it, unless the axis has size 1.
      combine: combines the results of two blocks if each block has a part of every tile; zeros are its neutral element.
    """
    if cut.count == 1:
        return step(jnp.int32(0), array, *operands)
    # Complete tiles are joined, not combined.
    if cut.whole_tiles:
        combine = None
    struct = jax.eval_shape(functools.partial(_of_block, step, cut), array, tuple(operands), np.int32(0))
    shape = list(struct.shape)
    shape[cut.axis] *= cut.count if combine is None else 1
    total = jnp.zeros(shape, struct.dtype)
    for index in range(cut.count):
        # One block at a time: several in flight would hold their temporaries together, and programs with collectives
        # can deadlock on the devices of a CPU (seen with jax 0.10.2).
        total = jax.block_until_ready(_add_block(step, cut, combine, array, tuple(operands), np.int32(index), total))
    return total


def _of_block(
    step: Callable[..., jax.Array],
    cut: Blocks,
    array: jax.Array,
    operands: tuple[jax.Array | None, ...],
    index: jax.Array,
) -> jax.Array:
    def part(operand: jax.Array | None) -> jax.Array | None:
        if operand is None or operand.ndim != array.ndim or operand.shape[cut.axis] == 1:
            return operand
        size = operand.shape[cut.axis] // cut.count
        return lax.dynamic_slice_in_dim(operand, index * size, size, cut.axis)

    return step(index, part(array), *map(part, operands))


# The donated total is updated in place, so only one block needs extra memory.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(6,))
def _add_block(
    step: Callable[..., jax.Array],
    cut: Blocks,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
    array: jax.Array,
    operands: tuple[jax.Array | None, ...],
    index: jax.Array,
    total: jax.Array,
) -> jax.Array:
    result = _of_block(step, cut, array, operands, index)
    if combine is not None:
        return combine(total, result)
    return lax.dynamic_update_slice_in_dim(total, result, index * result.shape[cut.axis], cut.axis)


def repeated(count: int, body: Callable[[jax.Array, T], T], start: T, cut: Blocks) -> T:
    """Runs `lax.fori_loop` from 0 or, if `body` processes several blocks, a Python loop."""
    if cut.count == 1:
        return lax.fori_loop(0, count, body, start)
    for index in range(count):
        start = body(jnp.int32(index), start)
    return start
