"""Attention of few queries to many keys, as in decoding, with one product for all heads of a batch row.

Keys [batch, kv_seq, kv_heads * head_dim] are read in place. Each query is widened to all key heads and is zero outside
its own head:

    z[(h, i), j] = sum_(h', d) q[i, h, d] [h = h'] k[j, h', d]

This takes kv_heads times the work of one product per head, but needs no transposed copy of keys and values. While the
queries of all heads are few, such a copy would dominate the time.
"""

from typing import Any

import jax.numpy as jnp

from stack_core.ops.building import accurate_dtype, contract
from stack_kernels.attention.products import by_group, unmixed
from stack_kernels.attention.tiles import Operands, Tiles, softmax_average

__all__ = ["are_few", "attend_few"]

_MAX_ROWS = 64


def are_few(q_seq: int, heads: int) -> bool:
    """Checks whether the queries of all heads are so few that reading the keys from memory dominates the time."""
    return q_seq * heads <= _MAX_ROWS


def attend_few(tiles: Tiles, operands: Operands, key: Any, value: Any) -> tuple[Any, Any]:
    """Computes the results of `attend`.

    Args:
      tiles: sizes of tiles, and the options of the scores.
      operands: as for `attend`; its keys and values are not read.
      key: [batch, kv_seq, kv_heads, key_dim].
      value: [batch, kv_seq, kv_heads, value_dim].
    """
    query = operands["query"]
    batch, kv_heads, value_dim = *query.shape[:2], value.shape[3]
    dtype = accurate_dtype(query.dtype)
    is_own_head = jnp.eye(kv_heads, dtype=bool)[None, :, None, None, :, None]
    # [batch, kv_heads, group, rows, kv_heads, head_dim], flattened to [batch, queries, kv_heads * head_dim].
    wide = jnp.where(is_own_head, query[:, :, :, :, None, :], 0).reshape(batch, -1, kv_heads * key.shape[3])
    mixed = contract("bqe,bke->bqk", wide, key.reshape(*key.shape[:2], -1), dtype).reshape(*query.shape[:4], -1)
    # The keys are transposed inside the lambda, because only the branch for NaN and infinity should pay for the copy.
    products = unmixed(mixed, lambda: by_group("bhqd,bhkd->bhqk", query, key.swapaxes(1, 2)))
    scores = tiles.scores(operands, products, operands["bias"], 0)

    def weigh(weights: Any) -> Any:
        narrow = weights.astype(value.dtype).reshape(batch, -1, weights.shape[-1])
        sums = contract("bqk,bke->bqe", narrow, value.reshape(*value.shape[:2], -1), dtype)
        of_heads = sums.reshape(*query.shape[:4], kv_heads, value_dim)
        # The product sums the values of all key heads; each query keeps only its own head's sum.
        return jnp.sum(jnp.where(is_own_head, of_heads, 0), axis=4)

    return softmax_average(scores, weigh, value_dim)
