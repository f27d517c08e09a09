"""Attention of one or more batch rows, one block of query rows at a time, and its gradient.

A block whose keys fit one tile takes their softmax in one step; other blocks carry a running softmax over their tiles.
If there are few blocks they are unrolled, each with only the keys that causality and the window leave; many blocks are
one loop. The gradient recomputes the weights, except for a single tile of few keys: then they are saved, at no more
than twice the size of the queries.

Query-like arrays are [batch, kv_heads, group, rows, _]; keys and values are [batch, kv_heads, keys, _], of two widths.
XLA's CPU backend runs a product that contracts the rows of both operands at a third of the usual speed. Therefore one
operand is transposed for the gradients of keys and values: the queries, with sums of shape [batch, kv_heads, _, keys],
or the weights if keys are few.

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.ops.building import (
    RunningSoftmax,
    accurate_dtype,
    add_tile,
    empty_softmax,
    finish,
    masked_logits,
    vary_alike,
)
from stack_kernels.attention.products import by_group, contract_heads, merged

__all__ = ["Operands", "Tiles", "attend", "attend_one_tile", "gradients", "softmax_average"]

Operands = Mapping[str, Any]

_MAX_LAID_OUT = 8

# The query axis and the key axis of each operand. An axis of size 1 is broadcast.
_QUERY_AXES = {"query": 3, "query_positions": 1, "bias": 3, "mask": 3, "q_segments": 1}
_KEY_AXES = {"key": 2, "value": 2, "bias": 4, "mask": 4, "kv_segments": 1}


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of attention, and the options of its scores.

    Attributes:
      rows: queries per block; divides the padded number of queries if blocks are not unrolled.
      keys: maximum number of keys per tile.
      window: number of visible keys left and right of a query; None leaves a side open.
      offset: key position of query 0; None if it is known only at run time.
      scale: factor of the products.
      softcap: softcap of the scores, or None.
    """

    rows: int
    keys: int
    window: tuple[int | None, int | None]
    offset: int | None
    scale: float
    softcap: float | None

    def laid_out(self, q_seq: int) -> bool:
        return self.offset is not None and q_seq <= _MAX_LAID_OUT * self.rows

    def keeps_weights(self, query: Any, key: Any) -> bool:
        """Checks whether the weights are saved for the gradient (a single tile of few keys).

        Takes token-major operands.
        """
        kv_seq, head_dim = key.shape[1], key.shape[3]
        fits = query.shape[1] <= self.rows and kv_seq <= self.keys
        return self.offset is not None and fits and _are_few(kv_seq, head_dim)

    def bounds(self, start: Any, operands: Operands) -> tuple[Any, Any]:
        """Returns the first visible key of the block at `start` and the end of its visible keys.

        Ints if statically known.
        """
        kv_seq = operands["key"].shape[2]
        left, right = self.window
        if self.offset is not None and isinstance(start, int):
            first_position, last_position = start + self.offset, start + self.rows - 1 + self.offset
        else:
            positions = _part(operands["query_positions"], 1, start, self.rows)
            first_position, last_position = jnp.min(positions), jnp.max(positions)
        # Python's functions keep the bounds static, and with static bounds a block needs no loop.
        low, high = (max, min) if isinstance(first_position, int) else (jnp.maximum, jnp.minimum)
        # Clamped before they are added, because positions and windows may be close to the limits of int32.
        first = 0 if left is None else high(low(first_position, left) - left, kv_seq)
        stop = kv_seq if right is None else high(last_position, kv_seq - 1 - right) + right + 1
        return first, stop

    def scores(self, part: Operands, products: Any, bias: Any, first_key: Any) -> Any:
        places = {name: x for name, x in part.items() if name not in {"query", "key", "value", "bias"}}
        options = {"scale": self.scale, "softcap": self.softcap, "window": self.window}
        return masked_logits(products, bias=bias, first_key=first_key, **places, **options)


def attend(tiles: Tiles, operands: Operands) -> tuple[Any, Any]:
    """Returns the output in fp32, of the width of the values, and the log of the softmax's denominator."""
    q_seq = operands["query"].shape[3]
    if tiles.laid_out(q_seq):
        starts = range(0, q_seq, tiles.rows)
        outputs, lses = zip(*(_attend_block(tiles, operands, start) for start in starts), strict=True)
        return jnp.concatenate(outputs, axis=3), jnp.concatenate(lses, axis=3)
    blocks = lax.map(functools.partial(_attend_block, tiles, operands), jnp.arange(0, q_seq, tiles.rows))
    return tuple(_in_rows(x) for x in blocks)


def attend_one_tile(tiles: Tiles, operands: Operands) -> tuple[Any, Any, Any]:
    """Returns the results of `attend` and the weights of the visible keys, in the dtype of the values."""
    first, stop = tiles.bounds(0, operands)
    part = _keys_of(operands, first, max(stop - first, 0))
    products = by_group("bhqd,bhkd->bhqk", part["query"], part["key"])
    weights, lse = finish(_exponentials(tiles.scores(part, products, part["bias"], first)))
    weights = weights.astype(part["value"].dtype)
    return by_group("bhqk,bhkd->bhqd", weights, part["value"]), lse, weights


def _in_rows(blocks: Any) -> Any:
    """Reshapes [blocks, batch, kv_heads, group, rows, ...] to [batch, kv_heads, group, blocks * rows, ...]."""
    ordered = jnp.moveaxis(blocks, 0, 3)
    return ordered.reshape(*ordered.shape[:3], -1, *ordered.shape[5:])


def _attend_block(tiles: Tiles, operands: Operands, start: Any) -> tuple[Any, Any]:
    block = _rows_of(operands, start, min(tiles.rows, operands["query"].shape[3]))

    def scores(part: Operands, first_key: Any) -> Any:
        return tiles.scores(part, by_group("bhqd,bhkd->bhqk", part["query"], part["key"]), part["bias"], first_key)

    first, stop = tiles.bounds(start, operands)
    if isinstance(first, int) and isinstance(stop, int) and stop - first <= tiles.keys:
        part = _keys_of(block, first, max(stop - first, 0))
        value = part["value"]

        def weigh(weights: Any) -> Any:
            return by_group("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)

        return softmax_average(scores(part, first), weigh, value.shape[3])

    def visit(number: Any, state: RunningSoftmax) -> RunningSoftmax:
        part = _keys_of(block, number * tiles.keys, tiles.keys)
        return add_tile(state, scores(part, number * tiles.keys), part["value"], by_group)

    # Inside a shard_map, a loop's state must vary over the mesh axes of the operands from the start.
    state = vary_alike(empty_softmax(block["query"], block["value"].shape[3]), operands)[0]
    return finish(_over_tiles(tiles, first, stop, visit, state))


def _over_tiles(tiles: Tiles, first: Any, stop: Any, visit: Callable[..., Any], state: Any) -> Any:
    # Whole tiles: their keys before `first` and from `stop` on are masked.
    return lax.fori_loop(first // tiles.keys, -(-stop // tiles.keys), visit, state)


def softmax_average(scores: Any, weigh: Callable[[Any], Any], width: int) -> tuple[Any, Any]:
    """Returns the softmax-weighted average of values and the log of the denominator; 0 and -inf without visible keys.

    If there are few weights, they are divided by the denominator instead of the output: XLA's CPU backend is slower at
    a product fused with work on its result, by a third in bf16.

    Args:
      scores: masked scores, [..., keys].
      weigh: sums the values with the given weights.
      width: size of a value.
    """
    if not _are_few(scores.shape[-1], width):
        exponentials = _exponentials(scores)
        return finish(exponentials._replace(weighted=weigh(exponentials.weighted)))
    weights, lse = finish(_exponentials(scores))
    return weigh(weights), lse


def _are_few(keys: int, width: int) -> bool:
    """Checks whether a query has few keys in relation to its width."""
    return keys <= 2 * width


def _exponentials(scores: Any) -> RunningSoftmax:
    """Returns a running softmax whose weighted sums are the exponentials themselves, before division."""
    # Finite without visible keys, where -inf - -inf would be NaN.
    largest = jnp.max(scores, axis=-1, initial=jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - largest[..., None])
    return RunningSoftmax(largest, jnp.sum(weights, axis=-1), weights)


def gradients(
    tiles: Tiles, operands: Operands, *, lse: Any, of_output: Any, of_lse: Any, output: Any = None, weights: Any = None
) -> dict[str, Any]:
    """Returns the gradients of the query, the keys, the values and the bias, in fp32.

    dz_ij = w_ij (do_i v_j - do_i o_i + dlse_i)        w_ij = exp(z_ij - lse_i)

    Args:
      tiles: sizes of tiles.
      operands: operands of `attend`.
      lse: log of the softmax's denominator.
      of_output: cotangent of the output.
      of_lse: cotangent of the lse.
      output: o; None if there are `weights`, since o_i do_i is then the mean of do_i v_j.
      weights: weights from `attend_one_tile`; without them they are recomputed tile by tile.
    """
    query, key = operands["query"], operands["key"]
    accurate, q_seq = accurate_dtype(query.dtype), query.shape[3]
    by_query = {
        "output": of_output,
        # Without visible keys lse is -inf, and exp(-inf - -inf) would be NaN; from a finite lse the weights are 0.
        "lse": jnp.maximum(lse, jnp.finfo(accurate).min)[..., None],
        "of_lse": jnp.where(lse > -jnp.inf, of_lse, 0)[..., None],
        "weights": weights,
    }
    if output is not None:
        by_query["mean"] = jnp.sum(of_output.astype(accurate) * output.astype(accurate), axis=-1, keepdims=True)
    transposes_weights = _transposes_weights(key)
    transposed: Operands = (
        {} if transposes_weights else {"query": query.swapaxes(3, 4), "output": of_output.swapaxes(3, 4)}
    )
    keyed = {name: operands[name] for name in ("key", "value")}
    shared = {
        name: jnp.zeros_like(x if transposes_weights else x.swapaxes(2, 3), dtype=accurate) for name, x in keyed.items()
    }
    if operands["bias"] is not None:
        shared["bias"] = jnp.zeros(operands["bias"].shape, accurate)
    shared = vary_alike(shared, operands, by_query)[0]

    def visit(shared: dict[str, Any], start: Any) -> tuple[dict[str, Any], Any]:
        size = min(tiles.rows, q_seq)
        block_values = {name: _part(x, 3, start, size) for name, x in by_query.items()}
        block_values |= {f"transposed_{name}": _part(x, 4, start, size) for name, x in transposed.items()}
        return _block_gradients(tiles, operands, block_values, shared, start)

    if tiles.laid_out(q_seq):
        of_blocks = []
        for start in range(0, q_seq, tiles.rows):
            shared, of_block = visit(shared, start)
            of_blocks.append(of_block)
        of_query = jnp.concatenate(of_blocks, axis=3)
    else:
        shared, of_blocks = lax.scan(visit, shared, jnp.arange(0, q_seq, tiles.rows))
        of_query = _in_rows(of_blocks)
    transposed_back = {} if transposes_weights else {name: shared[name].swapaxes(2, 3) for name in ("key", "value")}
    return {**shared, **transposed_back, "query": of_query}


def _transposes_weights(key: Any) -> bool:
    """Checks whether the weights, rather than the queries, are transposed for the gradients of keys and values."""
    kv_seq, head_dim = key.shape[2:]
    return 2 * kv_seq <= head_dim


def _block_gradients(
    tiles: Tiles, operands: Operands, block_values: Operands, shared: dict[str, Any], start: Any
) -> tuple[dict[str, Any], Any]:
    """Adds a block's contribution to the shared gradients; returns them and the gradient of its queries."""
    size = block_values["output"].shape[3]
    block = _rows_of(operands, start, size)

    def add(shared: dict[str, Any], of_query: Any, first_key: Any, keys: int) -> tuple[dict[str, Any], Any]:
        added = _tile_gradients(tiles, _keys_of(block, first_key, keys), block_values, first_key)
        # The axis of keys: the shared sums are [.., keys, features], or [.., features, keys] from transposed queries.
        axis = 2 if _transposes_weights(operands["key"]) else 3
        places = {"key": {axis: first_key}, "value": {axis: first_key}, "bias": {3: start, 4: first_key}}
        of_query = added["query"] if of_query is None else of_query + added["query"]
        return {name: _added(x, added[name], places[name]) for name, x in shared.items()}, of_query

    zeros = jnp.zeros(block["query"].shape, accurate_dtype(block["query"].dtype))
    carry = (shared, vary_alike(zeros, operands, block_values)[0])
    first, stop = tiles.bounds(start, operands)
    if isinstance(first, int) and isinstance(stop, int) and stop - first <= tiles.keys:
        return add(shared, None, first, stop - first) if first < stop else carry

    def visit(number: Any, carry: tuple[dict[str, Any], Any]) -> tuple[dict[str, Any], Any]:
        return add(carry[0], carry[1], number * tiles.keys, tiles.keys)

    return _over_tiles(tiles, first, stop, visit, carry)


def _tile_gradients(tiles: Tiles, part: Operands, block_values: Operands, first_key: Any) -> dict[str, Any]:
    products = by_group("bhqd,bhkd->bhqk", part["query"], part["key"])
    bias = None if part["bias"] is None else part["bias"].astype(products.dtype)  # and so is its gradient
    scores, scores_vjp = jax.vjp(lambda products, bias: tiles.scores(part, products, bias, first_key), products, bias)
    weights = block_values["weights"]
    if weights is None:
        weights = jnp.exp(scores - block_values["lse"]).astype(block_values["output"].dtype)
    # The barriers keep XLA from computing the weights and `of_products` twice: each is the operand of a product and is
    # also read by another pass.
    weights = lax.optimization_barrier(weights)
    wide = merged(weights.astype(scores.dtype))
    of_weights = merged(by_group("bhqd,bhkd->bhqk", block_values["output"], part["value"]))
    mean = (
        merged(block_values["mean"]) if "mean" in block_values else jnp.sum(wide * of_weights, axis=-1, keepdims=True)
    )
    of_scores = wide * (of_weights + (merged(block_values["of_lse"]) - mean))
    of_products, of_bias = scores_vjp(of_scores.reshape(scores.shape))
    of_products = of_products.astype(part["query"].dtype)
    of_products = lax.optimization_barrier(of_products)
    sum_rows = _contract_transposed_rows if "transposed_query" in block_values else _contract_rows
    return {
        "query": by_group("bhqk,bhkd->bhqd", of_products, part["key"].astype(of_products.dtype)),
        "key": sum_rows(block_values.get("transposed_query", part["query"]), of_products),
        "value": sum_rows(block_values.get("transposed_output", block_values["output"]), weights),
        "bias": of_bias,
    }


def _contract_transposed_rows(values: Any, weights: Any) -> Any:
    """Contracts group and rows in fp32.

    The operands are [batch, kv_heads, group, head_dim, rows] and [batch, kv_heads, group, rows, keys].
    """
    batch, kv_heads, group, rows, keys = weights.shape
    flat = values.swapaxes(2, 3).reshape(batch, kv_heads, values.shape[3], group * rows)
    return contract_heads("bhdq,bhqk->bhdk", flat, weights.reshape(batch, kv_heads, group * rows, keys))


def _contract_rows(values: Any, weights: Any) -> Any:
    """Contracts group and rows, in fp32: transposed `weights` by [batch, kv_heads, group, rows, head_dim]."""
    batch, kv_heads, group, rows, keys = weights.shape
    flat = values.reshape(batch, kv_heads, group * rows, values.shape[4])
    transposed_weights = jnp.moveaxis(weights, 4, 2).reshape(batch, kv_heads, keys, group * rows)
    return contract_heads("bhkq,bhqd->bhkd", transposed_weights, flat)


def _rows_of(operands: Operands, start: Any, size: int) -> dict[str, Any]:
    return {name: _part(x, _QUERY_AXES.get(name), start, size) for name, x in operands.items()}


def _keys_of(block: Operands, start: Any, size: int) -> dict[str, Any]:
    return {name: _part(x, _KEY_AXES.get(name), start, size) for name, x in block.items()}


def _part(x: Any, axis: int | None, start: Any, size: int) -> Any:
    if x is None or axis is None or x.shape[axis] == 1:
        return x
    if isinstance(start, int):
        # Unrolled blocks are not padded, and the last one may be shorter.
        return lax.slice_in_dim(x, start, min(start + size, x.shape[axis]), axis=axis)
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _added(x: Any, part: Any, places: Mapping[int, Any]) -> Any:
    """Adds a part at its offset per axis; along axes of size 1, which are broadcast, the offset is 0."""
    starts: list[Any] = [0] * x.ndim
    for axis, start in places.items():
        if x.shape[axis] > 1:
            starts[axis] = start
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, starts, part.shape) + part, starts)
