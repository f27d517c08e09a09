"""Online softmax for attention over tiles of keys: the logits of a tile, and the update of the running softmax.

Query-like arrays are [batch, kv_heads, group, rows, _] here, where group counts the query heads of a key head; keys are
[batch, kv_heads, keys, key_dim] and values [batch, kv_heads, keys, value_dim].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from stack_core.ops.dispatch.contract import accurate_dtype, contract

__all__ = [
    "RunningSoftmax",
    "add_tile",
    "by_group",
    "empty_softmax",
    "finish",
    "joined_by_sinks",
    "masked_logits",
    "with_sinks",
]


class RunningSoftmax(NamedTuple):
    """Unnormalized softmax-weighted sum of the values so far, in fp32.

    Attributes:
      largest: m, the largest logit, [batch, kv_heads, group, rows]; the lowest finite number before the first key.
      total: sum_j exp(z_j - m).
      weighted: sum_j exp(z_j - m) v_j, [batch, kv_heads, group, rows, value_dim].
    """

    largest: Any
    total: Any
    weighted: Any


def empty_softmax(query: Any, value_dim: int) -> RunningSoftmax:
    """Returns the state before the first key."""
    dtype = accurate_dtype(query.dtype)
    rows = query.shape[:-1]
    weighted = jnp.zeros((*rows, value_dim), dtype)
    # A finite start instead of -inf, because -inf - (-inf) is NaN in rows without visible keys.
    return RunningSoftmax(jnp.full(rows, jnp.finfo(dtype).min), jnp.zeros(rows, dtype), weighted)


def by_group(subscripts: str, left: Any, right: Any) -> Any:
    """Computes `contract` in fp32 with the group and row axes of `left` merged."""
    batch, kv_heads, group, rows, last = left.shape
    flat = left.reshape(batch, kv_heads, group * rows, last)
    product = contract(subscripts, flat, right, accurate_dtype(left.dtype))
    return product.reshape(*left.shape[:-1], product.shape[-1])


def add_tile(
    state: RunningSoftmax, scores: Any, value: Any, product: Callable[[str, Any, Any], Any] = by_group
) -> RunningSoftmax:
    """Adds one tile of values with logits [batch, kv_heads, group, rows, keys]; `product` is the einsum to use."""
    # The maximum only prevents overflow and cancels in the result, so it needs no gradient.
    largest = lax.stop_gradient(jnp.maximum(state.largest, jnp.max(scores, axis=-1, initial=-jnp.inf)))
    rescale = jnp.exp(state.largest - largest)
    weights = jnp.exp(scores - largest[..., None])
    weighted = product("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return RunningSoftmax(
        largest, state.total * rescale + jnp.sum(weights, axis=-1), state.weighted * rescale[..., None] + weighted
    )


def finish(state: RunningSoftmax) -> tuple[Any, Any]:
    """Returns the average of the values and the log of the softmax's denominator; 0 and -inf without visible keys."""
    safe = jnp.maximum(state.total, 0.5)  # The total is at least 1 unless no key was visible.
    lse = jnp.where(state.total == 0, -jnp.inf, jnp.log(safe) + state.largest)
    return state.weighted / safe[..., None], lse


def with_sinks(output: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """Returns the result of `finish` as if each head [heads] had one more key with this logit and value 0."""
    share, whole = joined_by_sinks(lse, sinks.reshape(1, *lse.shape[1:3], 1))
    return output * share[..., None], whole


def joined_by_sinks(lse: Any, sinks: Any) -> tuple[Any, Any]:
    """Adds sinks to the denominator; returns the remaining share of the keys and the log of the new denominator.

    Args:
      lse: log of the denominator without sinks, -inf without visible keys.
      sinks: logits that broadcast to `lse`.
    """
    sinks = sinks.astype(lse.dtype)
    is_empty = jnp.isneginf(lse) & jnp.isneginf(sinks)  # -inf - -inf is NaN, in logaddexp's gradient as well
    whole = jnp.logaddexp(jnp.where(is_empty, 0, lse), sinks)
    return jnp.exp(lse - whole), jnp.where(is_empty, -jnp.inf, whole)


def masked_logits(
    products: Any,
    *,
    scale: float,
    softcap: float | None,
    bias: Any = None,
    mask: Any = None,
    query_positions: Any,
    first_key: Any,
    window: tuple[int | None, int | None],
    kv_lengths: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
) -> Any:
    """Computes logits from the products of queries and keys, with -inf for masked pairs.

    Args:
      products: products of queries and keys, [batch, kv_heads, group, rows, keys].
      scale: factor on the products.
      softcap: bound on the magnitude of the scaled products; None disables it.
      bias, mask: arrays that broadcast to `products`.
      query_positions: key position of each query, [batch or 1, rows].
      first_key: position of the first key.
      window: (left, right), inclusive distances in keys; None means unlimited.
      kv_lengths: number of valid keys, [batch].
      q_segments, kv_segments: segments [batch, rows] and [batch, keys]; only pairs of equal segments are visible.
    """
    logits = products * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    left, right = window
    queries, keys = query_positions[:, :, None], first_key + jnp.arange(products.shape[-1])[None, None, :]
    conditions = [
        None if right is None else keys <= queries + right,
        None if left is None else keys >= queries - left,
        None if kv_lengths is None else keys < kv_lengths[:, None, None],
        None if q_segments is None else q_segments[:, :, None] == kv_segments[:, None, :],
    ]
    allowed = [condition[:, None, None] for condition in conditions if condition is not None]
    for condition in [*allowed, *([] if mask is None else [mask])]:
        logits = jnp.where(condition, logits, -jnp.inf)
    return logits
