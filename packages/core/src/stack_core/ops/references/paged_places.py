"""Clamping of the index arrays of `paged_attention`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.ops.dispatch.symbolic import Size

__all__ = ["as_int32", "bounded_places", "padding_as_zero"]

_INT32 = np.iinfo(np.int32)


def bounded_places(
    block_tables: Any, kv_lengths: Any, query_starts: Any, *, pages: int, slots: int, tokens: Size
) -> tuple[Any, Any, Any]:
    """Clamps the three arrays to their valid ranges, as int32.

    Page numbers are clamped to the pool, lengths to the capacity of a sequence's row of the table, and starts to
    [previous start, `tokens`].

    Args:
      pages: number of pages in the pool, at least 1.
      slots: number of slots in a page.
      tokens: number of tokens in the call.
    """
    most_keys = min(block_tables.shape[1] * slots, _INT32.max)
    return (
        jnp.clip(as_int32(block_tables), 0, pages - 1),
        jnp.clip(as_int32(kv_lengths), 0, most_keys),
        # Ascending starts give no sequence a negative number of queries.
        lax.cummax(jnp.clip(as_int32(query_starts), 0, tokens)),
    )


def padding_as_zero(output: Any, query_starts: Any) -> Any:
    """Zeroes the output [tokens, ...] of padding tokens, according to `query_starts` from `bounded_places`."""
    token = jnp.arange(output.shape[0])
    is_padding = (token < query_starts[0]) | (token >= query_starts[-1])
    return jnp.where(is_padding.reshape(-1, *[1] * (output.ndim - 1)), 0, output)


def as_int32(integers: Any) -> Any:
    """Converts integers of any dtype to int32 and saturates them."""
    info = jnp.iinfo(integers.dtype)
    if info.max > _INT32.max:
        integers = jnp.minimum(integers, integers.dtype.type(_INT32.max))
    if info.min < _INT32.min:
        integers = jnp.maximum(integers, integers.dtype.type(_INT32.min))
    return integers.astype(jnp.int32)
