"""Softmax attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import (
    Axes,
    check_floating,
    check_integer,
    check_positive,
    check_same_dtype,
    check_window,
)
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references import attention_tiles
from stack_core.ops.references.running_softmax import with_sinks

__all__ = [
    "OP",
    "REFERENCE",
    "PackedSegments",
    "attention",
    "attention_axes",
    "bounded_lengths",
    "bounded_offset",
    "check_attention",
    "paired_segments",
]

# Larger offsets could overflow int32 when added to a position in the sequence.
_MOST_OFFSET = 2**30


class PackedSegments(NamedTuple):
    """Segment ids of packed documents, with the promise that each is contiguous.

    Queries and keys are parts of one packed sequence: the keys of a segment are adjacent, query i has the segment of
    key i + `query_offset`, and a query before or after all keys can only share a segment with the nearest key. The
    visible keys of a query are then a range, which kernels need no mask for. Results are undefined if the promise is
    broken.

    Attributes:
      queries: int[batch, q_seq].
      keys: int[batch, kv_seq].
    """

    queries: Any
    keys: Any

    @classmethod
    def of(cls, segment_ids: Any) -> "PackedSegments":
        """Returns the segments of queries and keys at the same positions, from int[batch, seq]."""
        return cls(segment_ids, segment_ids)


def attention(
    query: Float[Array, "batch q_seq heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    *,
    causal: bool = False,
    query_offset: int | Int[Array, " batch"] | None = None,
    window: tuple[int | None, int | None] | None = None,
    bias: Float[Array, "#batch #heads #q_seq #kv_seq"] | None = None,
    mask: Bool[Array, "#batch #heads #q_seq #kv_seq"] | None = None,
    segment_ids: Int[Array, "batch seq"]
    | tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]]
    | PackedSegments
    | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "batch q_seq heads value_dim"] | tuple[Array, Float[Array, "batch q_seq heads"]]:
    """Computes softmax attention: the average of the values, weighted by the softmax of query-key products.

        o_i = sum_j exp(z_ij) v_j / d_i        d_i = sum_j exp(z_ij) + exp(s)
        z_ij = c tanh(scale q_i k_j / c) + b_ij    for the j that i may attend to

    c is `softcap` (none: z_ij = scale q_i k_j + b_ij), b is `bias`, s is the head's sink (none: no such term). Query i
    is at key position p_i = i + `query_offset` and may attend to key j if every condition in use holds: j <= p_i
    (`causal`), p_i - left <= j <= p_i + right (`window`), j < `kv_lengths`, equal segments, `mask`. A query without
    visible keys has output 0, lse -inf (its sink, if there are sinks) and zero gradient.

    Products run in the dtype of the operands with an fp32 accumulator, the softmax in fp32. Only one tile of the scores
    is in memory at a time, in the backward pass as well. If `query_offset` is an int, tiles that `causal` or `window`
    hides are skipped at no cost.

    Args:
      query: q, [batch, q_seq, heads, key_dim].
      key: k, [batch, kv_seq, kv_heads, key_dim]; heads is a multiple of kv_heads, consecutive heads share a key head.
      value: v, [batch, kv_seq, kv_heads, value_dim]; value_dim may differ from key_dim.
      causal: whether keys after the query are masked.
      query_offset: key position of query 0, a single number or one per batch row; by default kv_seq - q_seq.
      window: (left, right), inclusive distances in keys; None means unlimited.
      bias: b, [batch, heads, q_seq, kv_seq]; any axis may have size 1 and is then broadcast.
      mask: True where attention is allowed, shaped as `bias`.
      segment_ids: [batch, seq] if q_seq equals kv_seq, or the pair ([batch, q_seq], [batch, kv_seq]). A
        `PackedSegments` also promises that segments are contiguous.
      kv_lengths: [batch], number of valid leading keys, clamped to 0 .. kv_seq.
      softcap: c, positive.
      sinks: s, [heads], logits added to the denominator only.
      scale: factor on the products; by default key_dim ** -0.5.
      return_lse: whether to return log d as well.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      o, [batch, q_seq, heads, value_dim], of the dtype of `query`; with `return_lse` the pair
      (o, fp32[batch, q_seq, heads]).

    Raises:
      ShapeError: mismatched sizes; the message names the argument and the axis.
      ArgumentError: wrong dtypes, a negative window, or a non-positive softcap.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Vaswani et al., Attention Is All You Need, 2017 (arXiv:1706.03762); Ainslie et al., GQA, 2023
    (arXiv:2305.13245); sinks as in gpt-oss, 2025 (arXiv:2508.10925).
    """
    check_attention("attention", query, key, value, bias=bias, mask=mask, kv_lengths=kv_lengths, sinks=sinks)
    check_window("attention", window)
    check_positive("attention", softcap=softcap, scale=scale)
    q_seq, kv_seq = query.shape[1], key.shape[1]
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "segment_ids": paired_segments("attention", query, key, segment_ids),
        "kv_lengths": bounded_lengths(kv_lengths, kv_seq),
        "sinks": sinks,
    }
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "return_lse": return_lse,
    }
    offset = kv_seq - q_seq if query_offset is None else query_offset
    # A variable of `jax.export` cannot be a static option.
    if is_symbolic(offset):
        offset = jnp.full(query.shape[0], offset, jnp.int32)
    # A Python int stays static: tiles that it hides are then left out of the program.
    placed = options if isinstance(offset, int) else arrays
    placed["query_offset"] = bounded_offset("attention", query, offset, q_seq, kv_seq, window)
    return dispatch(OP, arrays, options, implementation, axes)


def check_attention(
    op: str, query: Any, key: Any, value: Any, *, bias: Any = None, mask: Any = None, kv_lengths: Any, sinks: Any
) -> None:
    """Checks the operands of `attention` or `ring_attention`."""
    sizes = Axes(op)
    sizes.match("query", query, "batch q_seq heads key_dim")
    sizes.match("key", key, "batch kv_seq kv_heads key_dim")
    sizes.match("value", value, "batch kv_seq kv_heads value_dim")
    sizes.match("bias", bias, "batch heads q_seq kv_seq", broadcast=True)
    sizes.match("mask", mask, "batch heads q_seq kv_seq", broadcast=True)
    sizes.match("kv_lengths", kv_lengths, "batch")
    sizes.match("sinks", sinks, "heads")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(
            f"{op}: query has {sizes['heads']} heads and key has {sizes['kv_heads']} kv_heads; "
            "expected a multiple, so that each key head serves equally many query heads."
        )
    check_floating(op, query=query, bias=bias, sinks=sinks)
    check_integer(op, kv_lengths=kv_lengths)
    check_same_dtype(op, query=query, key=key, value=value)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ArgumentError(f"{op}: mask has dtype {mask.dtype}; expected bool, True where attention is allowed.")


def paired_segments(op: str, query: Any, key: Any, segment_ids: Any) -> Any:
    """Returns the pair (query segments, key segments), or None."""
    if segment_ids is None:
        return None
    if not isinstance(segment_ids, Sequence):
        if query.shape[1] != key.shape[1]:
            raise ShapeError(
                f"{op}: segment_ids is one array, but q_seq is {query.shape[1]} and kv_seq {key.shape[1]}; "
                "pass the pair (of queries, of keys)."
            )
        segment_ids = (segment_ids, segment_ids)
    if len(segment_ids) != 2:
        raise ArgumentError(
            f"{op}: segment_ids has {len(segment_ids)} arrays; expected the pair (of queries, of keys)."
        )
    sizes = Axes(op)
    sizes.match("query", query, "batch q_seq heads key_dim")
    sizes.match("key", key, "batch kv_seq kv_heads key_dim")
    sizes.match("segment_ids[0]", segment_ids[0], "batch q_seq")
    sizes.match("segment_ids[1]", segment_ids[1], "batch kv_seq")
    return segment_ids if isinstance(segment_ids, PackedSegments) else tuple(segment_ids)


def bounded_lengths(kv_lengths: Any, kv_seq: Size) -> Any:
    """Clamps lengths to 0 .. `kv_seq`, as int32, so that padding keys of a tile are never visible."""
    return None if kv_lengths is None else _clipped(kv_lengths, 0, kv_seq)


def bounded_offset(op: str, query: Any, offset: Any, q_seq: Size, kv_seq: Size, window: Any) -> Any:
    """Clamps the offset to avoid int32 overflow of positions without changing which keys are visible.

    Args:
      q_seq, kv_seq: lengths of the full sequence, also if it is sharded.
    """
    left, right = window or (None, None)
    # At `low`, even the last query is before all keys that it could see; at `high`, even the first query is after them.
    low, high = -_MOST_OFFSET, _MOST_OFFSET
    if not is_symbolic(q_seq, kv_seq):
        low, high = max(-q_seq - (right or 0), low), min(kv_seq + (left or 0), high)
    if isinstance(offset, int):
        return min(max(offset, low), high)
    sizes = Axes(op)
    sizes.match("query", query, "batch q_seq heads key_dim")
    sizes.match("query_offset", offset, "batch")
    check_integer(op, query_offset=offset)
    return _clipped(offset, low, high)


def _clipped(x: Any, low: int, high: Size) -> Any:
    # The bounds may exceed a small dtype.
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    return jnp.clip(x, max(low, jnp.iinfo(x.dtype).min), high).astype(jnp.int32)


def _reference(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any,
    mask: Any,
    segment_ids: Any,
    kv_lengths: Any,
    sinks: Any,
    causal: bool,
    window: Any,
    query_offset: Any,
    return_lse: bool,
    requested: Any,
    **options: Any,
) -> Any:
    batch, q_seq, heads, key_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, q_seq, kv_heads, heads // kv_heads, key_dim)
    left, right = window or (None, None)
    q_segments, kv_segments = segment_ids or (None, None)
    operands = {
        "query": grouped.transpose(0, 2, 3, 1, 4),
        "key": key.swapaxes(1, 2),
        "value": value.swapaxes(1, 2),
        "bias": _by_group(bias, kv_heads),
        "mask": _by_group(mask, kv_heads),
        "query_positions": jnp.arange(q_seq)[None, :] + jnp.asarray(query_offset).reshape(-1, 1),
        "q_segments": q_segments,
        "kv_segments": kv_segments,
        "kv_lengths": kv_lengths,
    }
    window = (left, 0 if causal else right)
    output, lse = attention_tiles.attend(operands, window=window, query_offset=query_offset, **options)
    if sinks is not None:
        output, lse = with_sinks(output, lse, sinks)
    output = output.transpose(0, 3, 1, 2, 4).reshape(batch, q_seq, heads, value.shape[3]).astype(query.dtype)
    lse = lse.transpose(0, 3, 1, 2).reshape(batch, q_seq, heads)
    return (output, lse) if return_lse else output, {"lse": lse}


def _by_group(array: Any, kv_heads: int) -> Any:
    """[batch, heads, q_seq, kv_seq] -> [batch, kv_heads, group, q_seq, kv_seq]; a head axis of size 1 stays 1."""
    if array is None or array.shape[1] == 1:
        return None if array is None else array[:, :, None]
    return array.reshape(array.shape[0], kv_heads, array.shape[1] // kv_heads, *array.shape[2:])


def attention_axes(call: OpCall) -> OpAxes:
    """Returns the axes of a call of `attention` or `ring_attention`."""
    scores = "batch heads q_seq kv_seq"
    operands = {
        "query": "batch q_seq heads key_dim",
        "key": "batch kv_seq kv_heads key_dim",
        "value": "batch kv_seq kv_heads value_dim",
        "bias": scores,
        "mask": scores,
        "segment_ids": ("batch q_seq", "batch kv_seq"),
        "kv_lengths": "batch",
        "sinks": "heads",
        "query_offset": "batch",
    }
    outputs = ("batch q_seq heads value_dim", "batch q_seq heads")
    return OpAxes(
        {name: axes for name, axes in operands.items() if name in call.arrays},
        outputs if call.options["return_lse"] else outputs[:1],
        {"lse": outputs[1]},
        whole=frozenset({"q_seq", "kv_seq", "key_dim", "value_dim"}),
        # Each key head must be on the devices of its query heads.
        together=(("heads", "kv_heads"),),
    )


OP = Op("attention", _reference, attention_axes, folds="batch", residuals=("lse",), keeps=True, linear_in=("value",))
"""The residual `lse` is log d, as returned with `return_lse`.

A backward pass that requires it, and is given the output and the lse of attention to further keys as well, returns the
share of its own keys in the gradients, because it computes dz_ij = exp(z_ij - lse_i) (do_i v_j - do_i o_i).
"""

REFERENCE = OP.implementation()
