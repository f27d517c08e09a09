"""Softmax attention with the sequence sharded over a ring of devices, which pass keys and values around."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ShapeError
from stack_core.ops.definitions.attention import (
    PackedSegments,
    attention_axes,
    bounded_lengths,
    bounded_offset,
    check_attention,
    paired_segments,
)
from stack_core.ops.dispatch.backward_call import BackwardCall, as_backward
from stack_core.ops.dispatch.check import axis_size, check_known, check_positive, check_window
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references import attention_tiles
from stack_core.ops.references.running_softmax import with_sinks

__all__ = ["OP", "REFERENCE", "ring_attention"]


def ring_attention(
    query: Float[Array, "batch q_seq heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    *,
    axis_name: str | tuple[str, ...],
    order: str = "zigzag",
    causal: bool = False,
    query_offset: int | Int[Array, " batch"] | None = None,
    window: tuple[int | None, int | None] | None = None,
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
    """Computes `attention` inside `jax.shard_map`, of local queries to the keys of all n devices along `axis_name`.

        o = attention(all queries, all keys, all values), with device i returning the rows of its queries

    Each device holds 1/n of the queries and 1/n of the keys, in the given `order`:

        contiguous:  device i has block i of n equal blocks of the sequence
        zigzag:      device i has blocks i and 2n - 1 - i of 2n equal blocks, concatenated, which balances the work of
                     all devices with `causal`

    Each device stores the keys of one device at a time. While it attends, it sends its current keys to one neighbour
    and receives the next keys from the other, n - 1 times. The backward pass repeats the ring instead of storing the
    keys of other devices. Pairs of blocks hidden by `causal`, `window` or `kv_lengths` are skipped.

    Differences from `attention`: positions, `query_offset`, `window` and `kv_lengths` refer to the full sequence. The
    arguments `bias` and `mask` are not supported, since their size would be local queries times all keys.

    Args:
      query: q of this device, [batch, q_seq, heads, key_dim].
      key: k of this device, [batch, kv_seq, kv_heads, key_dim].
      value: v of this device, [batch, kv_seq, kv_heads, value_dim].
      axis_name: mesh axis or axes that shard the sequence.
      order: "zigzag" or "contiguous", for queries and keys.
      query_offset: key position of query 0 of the full sequence; by default n (kv_seq - q_seq).
      segment_ids: segments of this device's tokens, as for `attention`. A `PackedSegments` promises that segments are
        contiguous in the full sequence.
      causal, window, kv_lengths, softcap, sinks, scale, return_lse: as for `attention`.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      o, [batch, q_seq, heads, value_dim], of the dtype of `query`; with `return_lse` the pair
      (o, fp32[batch, q_seq, heads]).

    Raises:
      ShapeError: mismatched sizes, or an odd local sequence with zigzag order.
      ArgumentError: wrong dtypes, or an `axis_name` that no surrounding `jax.shard_map` has.
      UnknownName: unknown order.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889); the zigzag order as in
    Llama 3, 2024 (arXiv:2407.21783), section 3.3.2.
    """
    check_attention("ring_attention", query, key, value, kv_lengths=kv_lengths, sinks=sinks)
    check_known("ring_attention", "order", order, ("zigzag", "contiguous"))
    check_window("ring_attention", window)
    check_positive("ring_attention", softcap=softcap, scale=scale)
    devices = axis_size("ring_attention", axis_name)
    if order == "zigzag" and (query.shape[1] % 2 or key.shape[1] % 2):
        raise ShapeError(
            f"ring_attention: q_seq is {query.shape[1]} and kv_seq {key.shape[1]} on each device; zigzag order needs "
            f"even ones. Make the whole sequence a multiple of {2 * devices}, or pass order='contiguous'."
        )
    # Positions, windows and lengths refer to the full sequence, of which each device has 1/n.
    q_seq, kv_seq = devices * query.shape[1], devices * key.shape[1]
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "segment_ids": paired_segments("ring_attention", query, key, segment_ids),
        "kv_lengths": bounded_lengths(kv_lengths, kv_seq),
        "sinks": sinks,
    }
    options = {
        "axis_name": axis_name,
        "order": order,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "return_lse": return_lse,
    }
    offset = kv_seq - q_seq if query_offset is None else query_offset
    # A Python int stays static, which lets kernels skip hidden blocks at compile time.
    placed = options if isinstance(offset, int) else arrays
    placed["query_offset"] = bounded_offset("ring_attention", query, offset, q_seq, kv_seq, window)
    return dispatch(OP, arrays, options, implementation, axes)


class _Block(NamedTuple):
    """Contiguous tokens: their rows on the device, and the position of the first token in the full sequence."""

    rows: slice
    start: Any


class _Keys(NamedTuple):
    """Data passed around the ring: key [batch, kv_heads, kv_seq, key_dim], value, segments [batch, kv_seq] or None."""

    key: Any
    value: Any
    segments: Any

    def part(self, rows: slice) -> "_Keys":
        return _Keys(
            self.key[:, :, rows], self.value[:, :, rows], None if self.segments is None else self.segments[:, rows]
        )


class _Queries(NamedTuple):
    """Queries [batch, kv_heads, group, q_seq, key_dim]; segments [batch, q_seq] or None; position of the first."""

    query: Any
    segments: Any
    offset: Any
    kv_lengths: Any


class _Softmax(NamedTuple):
    """Average of the values and log of the softmax's denominator; 0 and -inf without keys."""

    output: Any
    lse: Any


@dataclass(frozen=True)
class _Ring:
    """Static part of a call; `window` includes causality."""

    axis_name: Any
    order: str
    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None

    @property
    def devices(self) -> int:
        return int(lax.axis_size(self.axis_name))

    def pass_on(self, tree: Any) -> Any:
        """Sends a pytree to the next device and returns the previous device's."""
        # Every device sends to its right neighbour, so after d steps it has the keys of device i - d (mod n).
        pairs = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    def blocks(self, device: Any, seq: int) -> list[_Block]:
        """Returns the blocks of a device with `seq` tokens."""
        if self.order == "contiguous":
            return [_Block(slice(0, seq), device * seq)]
        # Of 2n blocks, device i has blocks i and 2n - 1 - i: one early and one late block, so causal work is equal.
        half, last = seq // 2, 2 * self.devices - 1
        return [_Block(slice(0, half), device * half), _Block(slice(half, seq), (last - device) * half)]

    def attend(self, queries: _Queries, keys: _Keys) -> _Softmax:
        """Computes attention to the keys of all devices."""

        def step(carry: tuple[_Keys, _Softmax], distance: Any) -> tuple[tuple[_Keys, _Softmax], None]:
            keys, softmax = carry
            following = self.pass_on(keys)
            return (following, self.with_keys(softmax, queries, keys, distance)), None

        # `shard_map` types: the carry of a scan must vary over the same axes before and after a step.
        start = vary_alike(_no_keys(queries, keys), queries, keys, lax.axis_index(self.axis_name))[0]
        travelling = vary_alike(keys, lax.axis_index(self.axis_name))[0]
        # n - 1 transfers for n devices: the keys that arrive last are used and not passed on.
        (keys, softmax), _ = lax.scan(step, (travelling, start), jnp.arange(self.devices - 1))
        return self.with_keys(softmax, queries, keys, self.devices - 1)

    def with_keys(self, softmax: _Softmax, queries: _Queries, keys: _Keys, distance: Any) -> _Softmax:
        """Merges attention to `keys`, which belong to the device `distance` steps before this device."""
        for query_block, key_block in self.pairs(queries, keys, distance):
            part = _rows(queries, query_block.rows)
            place = _place(part, query_block, key_block)
            found = self.if_visible(
                lambda part=part, key_block=key_block, place=place: self.pair(
                    part, keys.part(key_block.rows), place, key_block
                ),
                lambda part=part: _no_keys(part, keys),
                (part, keys, place),
                self.visible(part, key_block, place),
            )
            # Online softmax: two partial outputs are averaged by the weights exp(lse) of their keys.
            so_far = _Softmax(*(x[:, :, :, query_block.rows] for x in softmax))
            merged = _merged(so_far, found)
            softmax = _Softmax(*(_put(x, y, query_block.rows, axis=3) for x, y in zip(softmax, merged, strict=True)))
        return softmax

    def pairs(self, queries: _Queries, keys: _Keys, distance: Any) -> list[tuple[_Block, _Block]]:
        me = lax.axis_index(self.axis_name)
        query_blocks = self.blocks(me, queries.query.shape[3])
        key_blocks = self.blocks(jnp.mod(me - distance, self.devices), keys.key.shape[2])
        return [(one, other) for one in query_blocks for other in key_blocks]

    def pair(self, queries: _Queries, keys: _Keys, place: Any, key_block: _Block) -> _Softmax:
        """Computes attention of one query block to one key block, with query 0 at key `place` [batch or 1]."""
        rows, length = queries.query.shape[3], keys.key.shape[2]
        lengths = queries.kv_lengths
        operands = {
            "query": queries.query,
            "key": keys.key,
            "value": keys.value,
            "bias": None,
            "mask": None,
            "query_positions": jnp.arange(rows)[None, :] + place[:, None],
            "q_segments": queries.segments,
            "kv_segments": keys.segments,
            "kv_lengths": None if lengths is None else jnp.clip(lengths - key_block.start, 0, length),
        }
        options: dict[str, Any] = {"window": self.window, "scale": self.scale, "softcap": self.softcap}
        return _Softmax(*attention_tiles.attend(operands, query_offset=None, **options))

    def visible(self, queries: _Queries, key_block: _Block, place: Any) -> Any:
        """Returns whether any key of a block may be visible, ignoring segments; None means always."""
        left, right = self.window
        rows, length = queries.query.shape[3], key_block.rows.stop - key_block.rows.start
        # The last query sees keys up to its position + right; the first one from its position - left.
        conditions = [] if right is None else [jnp.max(place) + rows - 1 + right >= 0]
        conditions += [] if left is None else [jnp.min(place) - left <= length - 1]
        if queries.kv_lengths is not None:
            conditions.append(jnp.any(queries.kv_lengths > key_block.start))
        return jnp.all(jnp.stack(conditions)) if conditions else None

    def if_visible(self, function: Callable[[], Any], otherwise: Callable[[], Any], operands: Any, seen: Any) -> Any:
        if seen is None:
            return function()
        # Both branches of `lax.cond` need equal dtypes and varying axes.
        shapes = jax.eval_shape(function)
        alike = lambda made: jax.tree.map(lambda x, like: x.astype(like.dtype), made, shapes)
        both = lambda made: vary_alike(made, operands)[0]
        return lax.cond(seen, lambda: both(function()), lambda: both(alike(otherwise())))

    def gradients(self, queries: _Queries, keys: _Keys, total: _Softmax, cotangent: _Softmax) -> tuple[Any, Any, Any]:
        """Computes the gradients of query, key and value in a second pass around the ring.

            do_p = w do        dlse_p = w (do (o_p - o) + dlse)        w = exp(lse_p - lse)

        do and dlse are the cotangents of the output and the lse; o_p and lse_p are the output and lse of one pair of
        blocks.
        """

        def step(carry: Any, distance: Any) -> Any:
            keys, of_keys, of_query = carry
            following = self.pass_on(keys)
            for query_block, key_block in self.pairs(queries, keys, distance):
                added = self._pair_gradients(queries, keys, total, cotangent, query_block, key_block)
                of_query = _put(of_query, of_query[:, :, :, query_block.rows] + added[0], query_block.rows, axis=3)
                of_keys = tuple(
                    _put(x, x[:, :, key_block.rows] + more, key_block.rows, axis=2)
                    for x, more in zip(of_keys, added[1:], strict=True)
                )
            return (following, self.pass_on(of_keys), of_query), None

        dtype = accurate_dtype(queries.query.dtype)
        zeros = [jnp.zeros(x.shape, dtype) for x in (keys.key, keys.value, queries.query)]
        everything = (queries, keys, total, cotangent, lax.axis_index(self.axis_name))
        *of_keys, of_query = vary_alike(zeros, everything)[0]
        start = (vary_alike(keys, everything)[0], tuple(of_keys), of_query)
        # n steps, not n - 1: the gradients of a device's keys travel with the keys until they are home again.
        (_, (of_key, of_value), of_query), _ = lax.scan(step, start, jnp.arange(self.devices))
        return of_query, of_key, of_value

    def _pair_gradients(
        self,
        queries: _Queries,
        keys: _Keys,
        total: _Softmax,
        cotangent: _Softmax,
        query_block: _Block,
        key_block: _Block,
    ) -> tuple[Any, Any, Any]:
        part, other = _rows(queries, query_block.rows), keys.part(key_block.rows)
        row_total, row_cotangent = (
            _Softmax(*(x[:, :, :, query_block.rows] for x in each)) for each in (total, cotangent)
        )
        place = _place(part, query_block, key_block)
        dtype = accurate_dtype(part.query.dtype)

        def gradients() -> tuple[Any, Any, Any]:
            def attend(query: Any, key: Any, value: Any) -> _Softmax:
                return self.pair(part._replace(query=query), _Keys(key, value, other.segments), place, key_block)

            found, vjp = jax.vjp(attend, part.query, other.key, other.value)
            # Rows without keys have lse = -inf; -inf - -inf would be NaN.
            finite = jnp.where(row_total.lse == -jnp.inf, 0, row_total.lse)
            weight = jnp.where(found.lse == -jnp.inf, 0, jnp.exp(found.lse - finite))
            inner = jnp.sum(row_cotangent.output * (found.output - row_total.output), axis=-1)
            cotangents = _Softmax(row_cotangent.output * weight[..., None], weight * (inner + row_cotangent.lse))
            of_query, of_key, of_value = (x.astype(dtype) for x in vjp(cotangents))
            return of_query, of_key, of_value

        def nothing() -> tuple[Any, Any, Any]:
            of_query, of_key, of_value = (jnp.zeros(x.shape, dtype) for x in (part.query, other.key, other.value))
            return of_query, of_key, of_value

        seen = self.visible(part, key_block, place)
        return self.if_visible(gradients, nothing, (part, other, row_total, row_cotangent, place), seen)


def _put(array: Any, part: Any, rows: slice, *, axis: int) -> Any:
    """Returns `array` with some of its rows replaced.

    `array.at[...].set` would scatter with an index of size 0 if `rows` covers all rows; such an index, unused inside
    `shard_map`, crashes XLA's compiler (jax 0.11.2, CPU).
    """
    return lax.dynamic_update_slice_in_dim(array, part, rows.start, axis)


def _rows(queries: _Queries, rows: slice) -> _Queries:
    segments = None if queries.segments is None else queries.segments[:, rows]
    return queries._replace(query=queries.query[:, :, :, rows], segments=segments)


def _place(queries: _Queries, query_block: _Block, key_block: _Block) -> Any:
    """Returns the position of the first query relative to the first key of a block, [batch or 1]."""
    return jnp.asarray(queries.offset).reshape(-1) + (query_block.start - key_block.start)


def _no_keys(queries: _Queries, keys: _Keys) -> _Softmax:
    rows, dtype = queries.query.shape[:-1], accurate_dtype(queries.query.dtype)
    return _Softmax(jnp.zeros((*rows, keys.value.shape[-1]), dtype), jnp.full(rows, -jnp.inf, dtype))


def _merged(one: _Softmax, other: _Softmax) -> _Softmax:
    """Merges attention to two disjoint sets of keys."""
    largest = lax.stop_gradient(jnp.maximum(one.lse, other.lse))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    first, second = jnp.exp(one.lse - largest), jnp.exp(other.lse - largest)
    total = first + second
    safe = jnp.where(total == 0, 1, total)
    output = (one.output * first[..., None] + other.output * second[..., None]) / safe[..., None]
    return _Softmax(output, jnp.where(total == 0, -jnp.inf, jnp.log(safe) + largest))


def _prepared(arguments: Mapping[str, Any]) -> tuple[_Ring, _Queries, _Keys]:
    """Converts the arrays and options of a call to the layout of tiles."""
    query, key = arguments["query"], arguments["key"]
    batch, q_seq, heads, key_dim = query.shape
    grouped = query.reshape(batch, q_seq, key.shape[2], heads // key.shape[2], key_dim)
    left, right = arguments["window"] or (None, None)
    window = (left, 0 if arguments["causal"] else right)
    q_segments, kv_segments = arguments["segment_ids"] or (None, None)
    ring = _Ring(arguments["axis_name"], arguments["order"], window, arguments["scale"], arguments["softcap"])
    queries = _Queries(grouped.transpose(0, 2, 3, 1, 4), q_segments, arguments["query_offset"], arguments["kv_lengths"])
    return ring, queries, _Keys(key.swapaxes(1, 2), arguments["value"].swapaxes(1, 2), kv_segments)


def _reference(*, requested: Any, **arguments: Any) -> Any:
    query, sinks = arguments["query"], arguments["sinks"]
    ring, queries, keys = _prepared(arguments)
    output, lse = ring.attend(queries, keys)
    if sinks is not None:
        output, lse = with_sinks(output, lse, sinks)
    output, lse = _ungrouped(output).astype(query.dtype), _ungrouped(lse)
    return (output, lse) if arguments["return_lse"] else output, {"lse": lse}


@as_backward
def _backward(call: BackwardCall) -> Mapping[str, Any]:
    ring, queries, keys = _prepared({**call.arrays, **call.options})
    dtype, kv_heads = accurate_dtype(queries.query.dtype), keys.key.shape[1]
    output, of_output, lse = call.outputs, call.cotangents, call.residuals["lse"]
    of_lse = jnp.zeros_like(lse)
    if call.options["return_lse"]:
        (output, _), (of_output, of_lse) = call.outputs, call.cotangents
    by_group = [_grouped(x.astype(dtype), kv_heads) for x in (output, lse, of_output, of_lse)]
    total, cotangent = _Softmax(*by_group[:2]), _Softmax(*by_group[2:])
    of_query, of_key, of_value = ring.gradients(queries, keys, total, cotangent)
    found = {"query": _ungrouped(of_query), "key": of_key.swapaxes(1, 2), "value": of_value.swapaxes(1, 2)}
    if call.arrays["sinks"] is not None:
        sinks = call.arrays["sinks"].astype(dtype)
        of_lse = of_lse - jnp.sum(of_output * output, axis=-1, dtype=dtype)
        found["sinks"] = jnp.sum(jnp.exp(sinks - lse) * of_lse, axis=(0, 1))
    return {name: gradient.astype(call.arrays[name].dtype) for name, gradient in found.items()}


def _grouped(x: Any, kv_heads: int) -> Any:
    """[batch, seq, heads, ...] -> [batch, kv_heads, group, seq, ...]."""
    batch, seq, heads, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, seq, kv_heads, heads // kv_heads, *rest), 1, 3)


def _ungrouped(x: Any) -> Any:
    """Inverts `_grouped`."""
    batch, kv_heads, group, seq, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(batch, seq, kv_heads * group, *rest)


OP = Op("ring_attention", _reference, attention_axes, folds="batch", residuals=("lse",), backward=_backward)
"""The residual `lse` is log d, as returned with `return_lse`."""

REFERENCE = OP.implementation()
"""Computes every pair of blocks tile by tile, in plain JAX."""
