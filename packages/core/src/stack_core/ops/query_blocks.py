"""Attention of one block of queries at a time, which bounds the memory of masks and scores."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["block_rows", "map_query_blocks"]


def block_rows(seq: int, max_rows: int) -> int:
    """Returns the number of queries of a block, which divides `seq` queries as evenly as possible."""
    return math.ceil(seq / math.ceil(seq / max_rows))


def map_query_blocks(function: Callable[[Any], Any], arrays: Any, max_rows: int) -> Any:
    """Applies a function to one block of queries after another, and joins its results.

    Args:
      function: function of the arrays of a block, [batch, rows, ...], that returns a pytree of such arrays. Rows after
        the last query are zero. A block is computed again in the backward pass: otherwise the loop would store its mask
        and scores.
      arrays: pytree of arrays [batch, seq, ...].
      max_rows: largest number of queries of a block; a single block is not a loop.
    """
    batch, seq = jax.tree.leaves(arrays)[0].shape[:2]
    if seq <= max_rows:
        return function(arrays)
    rows = block_rows(seq, max_rows)
    blocks = math.ceil(seq / rows)

    def divide(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * rows - seq), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, blocks, rows, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, blocks * rows, *x.shape[3:])[:, :seq]

    return jax.tree.map(join, lax.map(jax.checkpoint(function), jax.tree.map(divide, arrays)))
