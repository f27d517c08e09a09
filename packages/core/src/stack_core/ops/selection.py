"""Attention to the keys that an indexer selects for each query (DeepSeek sparse attention).

Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (arXiv:2512.02556), section 2.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.mesh import LogicalAxes, parts_of
from stack_core.ops.definitions.attention import attention
from stack_core.ops.dispatch.contract import accurate_dtype, contract

__all__ = ["KeySelection", "attend_selected", "index_scores", "selected_keys"]

_BLOCK_BYTES = 2**26
"""Size of the index scores of one block of queries, on one device."""


@dataclass(frozen=True, kw_only=True)
class KeySelection:
    """Operands by which each query selects keys; see `index_scores`.

    Attributes:
      query: q, [batch, q_seq, index_heads, index_dim].
      weights: w, [batch, q_seq, index_heads], with the scale of the products.
      key: k, [batch, kv_seq, index_dim], shared by all heads.
      count: most keys that a query selects.
    """

    query: Any
    weights: Any
    key: Any
    count: int


def index_scores(
    query: Float[Array, "batch q_seq heads dim"],
    weights: Float[Array, "batch q_seq heads"],
    key: Float[Array, "batch kv_seq dim"],
) -> Float[Array, "batch q_seq kv_seq"]:
    """Computes the index scores I_ij = sum_h w_ih max(q_ih k_j, 0), accumulated in fp32.

    All heads are computed together if their products fit into `_BLOCK_BYTES`, otherwise one after another.
    """
    dtype = accurate_dtype(query.dtype)
    weights = weights.astype(dtype)
    batch, rows, heads, _ = query.shape
    if heads * _bytes_of(batch, rows, key.shape[1]) <= _BLOCK_BYTES:
        products = jax.nn.relu(contract("bqhd,bkd->bqhk", query, key, dtype))
        scores = contract("bqh,bqhk->bqk", weights, products, dtype)
    else:

        def add(scores: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            of_head, weight = head
            return scores + weight[..., None] * jax.nn.relu(contract("bqd,bkd->bqk", of_head, key, dtype)), None

        start = jnp.zeros((batch, rows, key.shape[1]), dtype)
        scores, _ = lax.scan(add, start, (jnp.moveaxis(query, 2, 0), jnp.moveaxis(weights, 2, 0)))
    # A negative weight makes -0 of 0, and `lax.top_k` orders the two.
    return jnp.where(scores == 0, 0, scores)


def selected_keys(
    scores: Float[Array, "*queries kv_seq"], visible: Bool[Array, "*queries kv_seq"], count: int
) -> Bool[Array, "*queries kv_seq"]:
    """Returns the mask of the `count` visible keys with the highest scores, or of all visible keys if they are fewer.

    Among equal scores the first keys are selected.
    """
    if scores.shape[-1] <= count:
        return visible
    scores = jnp.where(visible, scores, -jnp.inf)
    last = lax.top_k(scores, count)[0][..., -1:]
    above, equal = scores > last, scores == last
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1) <= room)))


def attend_selected(
    query: Float[Array, "batch q_seq heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    selection: KeySelection,
    *,
    positions: Int[Array, "batch q_seq"],
    segments: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None = None,
    scale: float | None,
    axes: Mapping[str, LogicalAxes],
) -> Float[Array, "batch q_seq heads value_dim"]:
    """Computes causal attention of each query to its selected keys.

        o_i = sum_j exp(z_ij) v_j / d_i        d_i = sum_j exp(z_ij)        z_ij = scale q_i k_j
        for the `count` keys j <= p_i with the highest index scores

    One block of queries is computed at a time, and its selection again in the backward pass, so no array of all queries
    and keys is stored. The selection has no gradient.

    Args:
      query, key, value, scale: see `ops.attention`.
      selection: the operands of the index scores.
      positions: p, the index of each query's own key; negative for queries that see no key.
      segments: segments of queries and keys; queries attend only to their own segment.
      axes: logical axes of query, key and value.
    """
    batch, q_seq = query.shape[:2]
    kv_seq = key.shape[1]
    names = {**axes, "mask": ("batch", None, None, None)}
    by_query: dict[str, Any] = {"query": query, "positions": positions}
    by_query |= {"index_query": lax.stop_gradient(selection.query), "weights": lax.stop_gradient(selection.weights)}
    if segments is not None:
        by_query["segments"] = segments[0]
    index_key = lax.stop_gradient(selection.key)

    def of_block(block: dict[str, Any]) -> Any:
        visible = jnp.arange(kv_seq) <= block["positions"][..., None]
        if segments is not None:
            visible &= block["segments"][..., None] == segments[1][:, None]
        scores = index_scores(block["index_query"], block["weights"], index_key)
        mask = selected_keys(scores, visible, selection.count)
        return attention(block["query"], key, value, mask=mask[:, None], scale=scale, axes=names)

    most_rows = max(_BLOCK_BYTES // _bytes_of(batch, 1, kv_seq), 1)
    if q_seq <= most_rows:
        return of_block(by_query)
    blocks = math.ceil(q_seq / most_rows)
    rows = math.ceil(q_seq / blocks)
    # A checkpoint: otherwise the scan would store the mask of every block for the backward pass.
    outputs = lax.map(jax.checkpoint(of_block), {name: _blocks(x, blocks, rows) for name, x in by_query.items()})
    return jnp.moveaxis(outputs, 0, 1).reshape(batch, blocks * rows, *outputs.shape[3:])[:, :q_seq]


def _bytes_of(batch: int, rows: int, keys: int) -> int:
    """Returns the size of fp32 scores on one device."""
    return 4 * math.ceil(batch / parts_of("batch")) * rows * keys


def _blocks(x: jax.Array, blocks: int, rows: int) -> jax.Array:
    """Divides [batch, q_seq, ...] into [blocks, batch, rows, ...], padded with zeros."""
    padded = jnp.pad(x, ((0, 0), (0, blocks * rows - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, rows, *x.shape[2:]), 1, 0)
