"""Softmax attention."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.errors import ArgumentError, ShapeError
from stack_core.ops._check import Axes, check_floating, check_positive, check_same_dtype
from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import Implementation, dispatch

__all__ = ["REFERENCE", "attention"]

_CHUNK_BYTES = 4 * 2**20
_FEWEST_ROWS = 64


def attention(
    query: Float[Array, "batch q_seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads head_dim"],
    *,
    causal: bool = False,
    query_offset: int | Int[Array, " batch"] | None = None,
    window: tuple[int | None, int | None] | None = None,
    bias: Float[Array, "#batch #heads #q_seq #kv_seq"] | None = None,
    mask: Bool[Array, "#batch #heads #q_seq #kv_seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "batch q_seq heads head_dim"] | tuple[Array, Float[Array, "batch q_seq heads"]]:
    """Each query's average of the values, weighted by the softmax of its products with the keys.

        o_i = sum_j exp(z_ij) v_j / d_i        d_i = sum_j exp(z_ij) + exp(s)
        z_ij = c tanh(scale q_i k_j / c) + b_ij    for the j that i may attend to

    c is `softcap` (none: z_ij = scale q_i k_j + b_ij), b is `bias`, s is the head's sink (none: no such term). Query i
    stands at key position p_i = i + `query_offset` and may attend to key j if all that is given allows it: j <= p_i
    (`causal`), p_i - left <= j <= p_i + right (`window`), j < `kv_lengths`, equal segments, `mask`. A query with
    nothing to attend to has output 0, lse -inf (its sink, if there are sinks) and no gradient.

    Products run in the dtype of the operands with an fp32 accumulator, the softmax in fp32.

    Args:
      query: q, [batch, q_seq, heads, head_dim].
      key: k, [batch, kv_seq, kv_heads, head_dim]; heads is a multiple of kv_heads, neighbours share a key head.
      value: v, like `key`.
      causal: forbid keys after the query.
      query_offset: the key position of query 0, one for all or one per batch row; by default kv_seq - q_seq.
      window: (left, right), inclusive distances in keys; None leaves a side open.
      bias: b, [batch, heads, q_seq, kv_seq], each axis its size or 1.
      mask: True where attention is allowed, shaped as `bias`.
      segment_ids: [batch, seq] when q_seq is kv_seq, or the pair ([batch, q_seq], [batch, kv_seq]).
      kv_lengths: [batch], the number of leading keys that exist.
      softcap: c, positive.
      sinks: s, [heads], logits that join the denominator and have no value.
      scale: by default head_dim ** -0.5.
      return_lse: also return log d.
      implementation: a name, several in order of preference, or None to let core choose.

    Returns:
      o, like `query`; with `return_lse` the pair (o, fp32[batch, q_seq, heads]).

    Raises:
      ShapeError: sizes that do not fit, naming the argument and the axis.
      ArgumentError: wrong dtypes, a negative window, a softcap that is not positive.
      UnsupportedOp: no implementation, or not the one named, supports the call.

    Source: Vaswani et al., Attention Is All You Need, 2017 (arXiv:1706.03762); Ainslie et al., GQA, 2023
    (arXiv:2305.13245); sinks as in gpt-oss, 2025 (arXiv:2508.10925).
    """
    _check_operands(query, key, value, bias, mask, kv_lengths, sinks)
    _check_window(window)
    check_positive("attention", softcap=softcap, scale=scale)
    segment_ids = _paired_segments(query, key, segment_ids)
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "segment_ids": segment_ids,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
    }
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "return_lse": return_lse,
    }
    if query_offset is None:
        query_offset = key.shape[1] - query.shape[1]
    if isinstance(query_offset, int):
        options["query_offset"] = query_offset
    else:
        axes = Axes("attention")
        axes.match("query", query, "batch q_seq heads head_dim")
        axes.match("query_offset", query_offset, "batch")
        arrays["query_offset"] = query_offset
    return dispatch("attention", arrays, options, implementation)


def _check_operands(query: Any, key: Any, value: Any, bias: Any, mask: Any, kv_lengths: Any, sinks: Any) -> None:
    axes = Axes("attention")
    axes.match("query", query, "batch q_seq heads head_dim")
    axes.match("key", key, "batch kv_seq kv_heads head_dim")
    axes.match("value", value, "batch kv_seq kv_heads head_dim")
    axes.match("bias", bias, "batch heads q_seq kv_seq", broadcast=True)
    axes.match("mask", mask, "batch heads q_seq kv_seq", broadcast=True)
    axes.match("kv_lengths", kv_lengths, "batch")
    axes.match("sinks", sinks, "heads")
    if axes["heads"] % axes["kv_heads"]:
        raise ShapeError(
            f"attention: query has {axes['heads']} heads and key has {axes['kv_heads']} kv_heads; "
            "expected a multiple, so that each key head serves equally many query heads."
        )
    check_floating("attention", query=query, bias=bias, sinks=sinks)
    check_same_dtype("attention", query=query, key=key, value=value)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ArgumentError(f"attention: mask has dtype {mask.dtype}; expected bool, True where attention is allowed.")


def _check_window(window: Any) -> None:
    if window is None:
        return
    sides = tuple(window)
    if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
        raise ArgumentError(f"attention: window is {window}; expected (left, right), each None or at least 0.")


def _paired_segments(query: Any, key: Any, segment_ids: Any) -> Any:
    if segment_ids is None:
        return None
    if not isinstance(segment_ids, Sequence):
        if query.shape[1] != key.shape[1]:
            raise ShapeError(
                f"attention: segment_ids is one array, but q_seq is {query.shape[1]} and kv_seq {key.shape[1]}; "
                "pass the pair (of queries, of keys)."
            )
        segment_ids = (segment_ids, segment_ids)
    axes = Axes("attention")
    axes.match("query", query, "batch q_seq heads head_dim")
    axes.match("key", key, "batch kv_seq kv_heads head_dim")
    axes.match("segment_ids[0]", segment_ids[0], "batch q_seq")
    axes.match("segment_ids[1]", segment_ids[1], "batch kv_seq")
    return tuple(segment_ids)


def _reference(
    query: Any, key: Any, value: Any, *, bias: Any, mask: Any, segment_ids: Any, query_offset: Any, **options: Any
) -> Any:
    """Attends chunk by chunk of queries, so that no more than a chunk of the scores exists at a time."""
    batch, q_seq, heads, _ = query.shape
    row_bytes = batch * heads * key.shape[1] * 4
    chunks = math.ceil(q_seq / max(_CHUNK_BYTES // max(row_bytes, 1), _FEWEST_ROWS))
    positions = jnp.arange(q_seq)[None, :] + jnp.asarray(query_offset).reshape(-1, 1)
    q_segments, kv_segments = segment_ids or (None, None)
    by_query = {"query": query, "positions": positions, "bias": bias, "mask": mask, "q_segments": q_segments}
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    if chunks <= 1:
        return _attend(**by_query, key=key, value=value, kv_segments=kv_segments, **options)

    query_axis = {"query": 1, "positions": 1, "bias": 2, "mask": 2, "q_segments": 1}
    looped: Mapping[str, Any] = {
        name: _split(x, query_axis[name], chunks)
        for name, x in by_query.items()
        if x is not None and x.shape[query_axis[name]] > 1
    }
    shared: Mapping[str, Any] = {name: x for name, x in by_query.items() if name not in looped}
    # The loop sums the gradients of key and value over its chunks in their own dtype, which has to be fp32.
    dtype, wide = key.dtype, accurate_dtype(key.dtype)
    key, value = key.astype(wide), value.astype(wide)

    @jax.checkpoint
    def attend_chunk(chunk: Any) -> Any:
        keys: Mapping[str, Any] = {"key": key.astype(dtype), "value": value.astype(dtype), "kv_segments": kv_segments}
        return _attend(**chunk, **shared, **keys, **options)

    return jax.tree.map(lambda x: _joined(x, q_seq), lax.map(attend_chunk, looped))


def _split(array: Any, axis: int, chunks: int) -> Any:
    """[..., q_seq, ...] -> [chunks, ..., rows, ...], padded with zeros at the end."""
    rows = math.ceil(array.shape[axis] / chunks)
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, rows * chunks - array.shape[axis])
    shape = (*array.shape[:axis], chunks, rows, *array.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(array, padding).reshape(shape), axis, 0)


def _joined(array: Any, q_seq: int) -> Any:
    """[chunks, batch, rows, ...] -> [batch, q_seq, ...]."""
    batch_first = jnp.moveaxis(array, 0, 1)
    return batch_first.reshape(array.shape[1], -1, *array.shape[3:])[:, :q_seq]


def _attend(query: Any, key: Any, value: Any, *, sinks: Any, return_lse: bool, **scoring: Any) -> Any:
    """Attention of queries that are few enough for their scores to be formed.

    Key and value come as [batch, kv_heads, kv_seq, head_dim].
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads, kv_seq = key.shape[1:3]
    scores = _scores(query, key, **scoring)
    largest = jnp.maximum(jnp.max(scores, axis=-1, initial=-jnp.inf), jnp.finfo(scores.dtype).min)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1)
        largest = jnp.maximum(largest, sinks)
    largest = lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest[..., None])
    denominator = jnp.sum(weights, axis=-1)
    if sinks is not None:
        denominator = denominator + jnp.exp(sinks - largest)
    safe = jnp.maximum(denominator, 0.5)  # It is at least 1, unless there is nothing to attend to.
    flat_weights = weights.astype(value.dtype).reshape(batch, kv_heads, (heads // kv_heads) * rows, kv_seq)
    output = contract("bhqk,bhkd->bhqd", flat_weights, value, scores.dtype).reshape(*safe.shape, head_dim)
    output = (output / safe[..., None]).transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    if not return_lse:
        return output
    lse = jnp.where(denominator > 0, jnp.log(safe) + largest, -jnp.inf)
    return output, lse.transpose(0, 3, 1, 2).reshape(batch, rows, heads)


def _scores(query: Any, key: Any, *, scale: float, softcap: float | None, bias: Any, mask: Any, **places: Any) -> Any:
    """The logits [batch, kv_heads, group, rows, kv_seq] in fp32, -inf where attention is forbidden."""
    batch, rows, _, head_dim = query.shape
    kv_heads, kv_seq = key.shape[1:3]
    grouped = query.reshape(batch, rows, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    flat = grouped.reshape(batch, kv_heads, grouped.shape[2] * rows, head_dim)
    scores = contract("bhqd,bhkd->bhqk", flat, key, accurate_dtype(query.dtype)) * scale
    scores = scores.reshape(*grouped.shape[:4], kv_seq)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _by_group(bias, kv_heads).astype(scores.dtype)
    for condition in (_allowed(kv_seq, **places), None if mask is None else _by_group(mask, kv_heads)):
        if condition is not None:
            scores = jnp.where(condition, scores, -jnp.inf)
    return scores


def _by_group(array: Any, kv_heads: int) -> Any:
    """[batch, heads, q, kv] -> [batch, kv_heads, group, q, kv]; a head axis of 1 stays 1."""
    if array.shape[1] == 1:
        return array[:, :, None]
    return array.reshape(array.shape[0], kv_heads, -1, *array.shape[2:])


def _allowed(
    kv_seq: int, *, positions: Any, causal: bool, window: Any, kv_lengths: Any, q_segments: Any, kv_segments: Any
) -> Any:
    """Which key each query may attend to, [batch or 1, 1, 1, rows, kv_seq]; None means all."""
    left, right = window or (None, None)
    if causal:
        right = 0
    query_positions, keys = positions[:, :, None], jnp.arange(kv_seq)[None, None, :]
    conditions = []
    if right is not None:
        conditions.append(keys <= query_positions + right)
    if left is not None:
        conditions.append(keys >= query_positions - left)
    if kv_lengths is not None:
        conditions.append(keys < kv_lengths[:, None, None])
    if q_segments is not None:
        conditions.append(q_segments[:, :, None] == kv_segments[:, None, :])
    if not conditions:
        return None
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = allowed & condition
    return allowed[:, None, None]


REFERENCE = OpImplementation(op="attention", name="reference", function=_reference, vjp=AUTODIFF)
