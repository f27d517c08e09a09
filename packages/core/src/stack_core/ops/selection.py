"""Attention to the keys that an indexer selects for each query (DeepSeek sparse attention), and the indexer's loss.

Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (arXiv:2512.02556), section 2.1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.mesh import LogicalAxes, axes_of, map_parts, parts_of
from stack_core.ops.definitions.attention import attention
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.query_blocks import map_query_blocks

__all__ = [
    "KeySelection",
    "attend_selected",
    "attend_selected_with_loss",
    "index_loss",
    "index_scores",
    "selected_keys",
]

_BLOCK_BYTES = 2**26
"""Size of the index scores of one block of queries, on one device."""


@partial(jax.tree_util.register_dataclass, data_fields=["query", "weights", "key"], meta_fields=["count"])
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
        # A checkpoint: otherwise the scan would store the products of every head for the backward pass.
        @jax.checkpoint
        def term(of_head: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
            return weight[..., None] * jax.nn.relu(contract("bqd,bkd->bqk", of_head, key, dtype))

        def add(scores: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return scores + term(*head, key), None

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
    names = {**axes, "mask": ("batch", None, None, None)}

    def of_block(query: jax.Array, scores: jax.Array, visible: jax.Array) -> Any:
        mask = selected_keys(scores, visible, selection.count)
        return attention(query, key, value, mask=mask[:, None], scale=scale, axes=names)

    return _in_blocks(of_block, query, lax.stop_gradient(selection), positions, segments)


def attend_selected_with_loss(
    query: Float[Array, "batch q_seq heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    selection: KeySelection,
    *,
    positions: Int[Array, "batch q_seq"],
    segments: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None = None,
    scale: float | None,
    axes: Mapping[str, LogicalAxes],
) -> tuple[Float[Array, "batch q_seq heads value_dim"], Float[Array, "batch q_seq"]]:
    """Returns `attend_selected`, and the loss of each query's index scores over its selected keys; see `index_loss`."""
    names = {**axes, "mask": ("batch", None, None, None)}

    def of_block(query: jax.Array, scores: jax.Array, visible: jax.Array) -> Any:
        mask = selected_keys(lax.stop_gradient(scores), visible, selection.count)
        output = attention(query, key, value, mask=mask[:, None], scale=scale, axes=names)
        return output, _divergence(_attention_shares(query, key, mask, scale, axes), scores, mask)

    return _in_blocks(of_block, query, selection, positions, segments)


def index_loss(
    query: Float[Array, "batch q_seq heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    selection: KeySelection,
    *,
    positions: Int[Array, "batch q_seq"],
    segments: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None = None,
    scale: float | None,
    axes: Mapping[str, LogicalAxes],
) -> tuple[Float[Array, "batch q_seq"], Float[Array, "batch q_seq"]]:
    """Computes how far each query's index scores are from causal attention to all keys.

        loss_i = sum_j a_ij (log a_ij - log softmax_j(I_ij))        a_ij = sum_h softmax_j(z_hij) / heads

    a is the share of key j in the attention of query i: the sum of the probabilities of all heads, normalized. It is a
    constant for gradients, so the loss trains only the operands of the index scores I. Memory is bounded as in
    `attend_selected`.

    Args:
      query, key, scale: operands of the attention that the indexer imitates.
      selection: the operands of the index scores.
      positions, segments, axes: see `attend_selected`. Queries that see no key have a loss of 0.

    Returns:
      The loss of each query, and the sum of a_ij over the keys that the query would select, without a gradient.
    """

    def of_block(query: jax.Array, scores: jax.Array, visible: jax.Array) -> Any:
        shares = _attention_shares(query, key, visible, scale, axes)
        chosen = selected_keys(lax.stop_gradient(scores), visible, selection.count)
        return _divergence(shares, scores, visible), jnp.sum(jnp.where(chosen, shares, 0), axis=-1)

    return _in_blocks(of_block, query, selection, positions, segments)


def _divergence(
    shares: Float[Array, "batch rows kv_seq"],
    scores: Float[Array, "batch rows kv_seq"],
    mask: Bool[Array, "batch rows kv_seq"],
) -> Float[Array, "batch rows"]:
    """Computes the Kullback-Leibler divergence of the softmax of the scores under `mask` from the shares."""
    # The least number instead of -inf, whose difference from itself in a row without keys would be NaN.
    logs = jax.nn.log_softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.sum(jax.scipy.special.xlogy(shares, shares) - jnp.where(mask, shares * logs, 0), axis=-1)


def _attention_shares(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch kv_seq kv_heads dim"],
    mask: Bool[Array, "batch rows kv_seq"],
    scale: float | None,
    axes: Mapping[str, LogicalAxes],
) -> Float[Array, "batch rows kv_seq"]:
    """Computes the mean of the attention probabilities of all heads, one head after another, without a gradient."""
    heads, dtype = query.shape[2], accurate_dtype(query.dtype)
    scale = query.shape[3] ** -0.5 if scale is None else scale

    def of_device(query: jax.Array, key: jax.Array, mask: jax.Array) -> jax.Array:
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)

        def term(query: jax.Array, key: jax.Array) -> jax.Array:
            logits = scale * contract("bqd,bkd->bqk", query, key, dtype)
            logits = jnp.where(mask, logits, jnp.finfo(dtype).min)
            return jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0)

        def add(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + term(*head), None

        queries, keys = jnp.moveaxis(query, 2, 0), jnp.moveaxis(key, 2, 0)
        total, _ = lax.scan(add, term(queries[0], keys[0]), (queries[1:], keys[1:]))
        split = axes_of(axes["query"][2] or "")
        return lax.psum(total, split) if split else total

    rows: LogicalAxes = ("batch", None, None)
    arguments = [(query, axes["query"]), (key, axes["key"]), (mask, rows)]
    arguments = [(lax.stop_gradient(array), names) for array, names in arguments]
    total: jax.Array = map_parts(of_device, arguments, rows, name="the attention that an indexer imitates")
    return total / heads


def _in_blocks(
    of_block: Callable[[jax.Array, jax.Array, jax.Array], Any],
    query: Float[Array, "batch q_seq heads key_dim"],
    selection: KeySelection,
    positions: Int[Array, "batch q_seq"],
    segments: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None,
) -> Any:
    """Applies a function to one block of queries after another, and joins its results, [batch, q_seq, ...].

    Args:
      of_block: function of queries, their index scores and the mask of their visible keys. Arrays of all queries and
        keys are computed again in the backward pass.
    """
    batch, kv_seq = selection.key.shape[:2]
    by_query: dict[str, Any] = {"query": query, "positions": positions}
    by_query |= {"index_query": selection.query, "weights": selection.weights}
    if segments is not None:
        by_query["segments"] = segments[0]

    def run(block: dict[str, Any]) -> Any:
        visible = jnp.arange(kv_seq) <= block["positions"][..., None]
        if segments is not None:
            visible &= block["segments"][..., None] == segments[1][:, None]
        scores = index_scores(block["index_query"], block["weights"], selection.key)
        return of_block(block["query"], scores, visible)

    return map_query_blocks(run, by_query, max(_BLOCK_BYTES // _bytes_of(batch, 1, kv_seq), 1))


def _bytes_of(batch: int, rows: int, keys: int) -> int:
    """Returns the size of fp32 scores on one device."""
    return 4 * math.ceil(batch / parts_of("batch")) * rows * keys
