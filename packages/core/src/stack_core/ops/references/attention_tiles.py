"""Tiled attention in the order of FlashAttention, with one tile of the scores in memory at a time.

Tiles hidden by causality or a window are excluded from the program. Each direction is one loop with a static trip
count over one compiled tile.

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.abi.mesh import parts_of
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references.running_softmax import (
    RunningSoftmax,
    add_tile,
    by_group,
    empty_softmax,
    finish,
    masked_logits,
)

__all__ = ["attend"]

_TILE_BYTES = 2**20
_FEWEST_ROWS = 64
_FEWEST_KEYS = 256

# Index of the query axis and of the key axis of each operand. An axis of size 1 is broadcast.
_QUERY_AXES = {"query": 3, "query_positions": 1, "bias": 3, "mask": 3, "q_segments": 1}
_KEY_AXES = {"key": 2, "value": 2, "bias": 4, "mask": 4, "kv_segments": 1}

Operands = Mapping[str, Any]


@dataclass(frozen=True)
class _Tiles:
    """Tiling of the scores into `rows` by `keys`, with the indices (row, column) of the needed tiles."""

    rows: Size
    keys: Size
    needed: tuple[tuple[int, int], ...]
    logits: Callable[..., Any]

    def cut(self, operands: Operands, row: Any, column: Any) -> dict[str, Any]:
        """Slices the operands for one tile."""
        by_row = {name: _part(x, _QUERY_AXES.get(name), row, self.rows) for name, x in operands.items()}
        return {name: _part(x, _KEY_AXES.get(name), column, self.keys) for name, x in by_row.items()}

    def scores(self, products: Any, bias: Any, part: Operands, column: Any) -> Any:
        places = {name: x for name, x in part.items() if name not in {"query", "key", "value", "bias"}}
        return self.logits(products, bias=bias, first_key=column * self.keys, **places)

    def scan(self, visit: Callable[..., Any], carry: Any, operands: Any) -> Any:
        """Folds `visit(carry, row, column)` over all needed tiles."""
        carry = vary_alike(carry, operands)[0]
        needed = np.array(self.needed, np.int32).reshape(-1, 2)
        return lax.scan(lambda carry, tile: (visit(carry, *tile), None), carry, needed)[0]


def attend(
    operands: Operands, *, window: tuple[int | None, int | None], query_offset: Any, scale: float, softcap: float | None
) -> tuple[Any, Any]:
    """Computes attention of [batch, kv_heads, group, q_seq, key_dim] to [batch, kv_heads, kv_seq, key_dim | value_dim].

    Args:
      operands: `query`, `key`, `value`, and the array arguments of `masked_logits`.
      query_offset: key position of query 0 if it is an int; any other value means that it is unknown when tracing.

    Returns:
      The output [batch, kv_heads, group, q_seq, value_dim] in fp32, and the log of the softmax's denominator.
    """
    batch, kv_heads, group, q_seq, _ = operands["query"].shape
    kv_seq = operands["key"].shape[2]
    logits = functools.partial(masked_logits, scale=scale, softcap=softcap, window=window)
    # A tile is sized for the share of one device.
    devices = parts_of("batch") * parts_of("act_heads")
    if is_symbolic(q_seq, kv_seq):
        rows, keys = q_seq, kv_seq  # the number of tiles must be static
    else:
        sequences = 1 if is_symbolic(batch) else batch
        rows, keys = _tile_sizes(math.ceil(sequences * kv_heads * group / devices), q_seq, kv_seq)
    if (rows >= q_seq and keys >= kv_seq) or q_seq * kv_seq == 0:
        tiles = _Tiles(q_seq, kv_seq, ((0, 0),), logits)
        return finish(_with_tile(tiles, empty_softmax(operands["query"], operands["value"].shape[3]), operands, 0))
    # With a traced offset, any tile may be visible.
    hidden = (window, query_offset) if isinstance(query_offset, int) else ((None, None), 0)
    needed = _needed_tiles(rows, keys, (q_seq, kv_seq), *hidden)
    # Forward mode cannot pass through a `custom_vjp`.
    attend_tiles = _plain_attend if is_plain() else _attend
    output, lse = attend_tiles(_Tiles(rows, keys, needed, logits), _padded(operands, rows, keys))
    return output[..., :q_seq, :], lse[..., :q_seq]


def _tile_sizes(heads: int, q_seq: int, kv_seq: int) -> tuple[int, int]:
    """Returns rows and keys of tiles of about `_TILE_BYTES`, with about twice as many keys as rows.

    Sizes are evened out, so the last tile is not much smaller than the others.

    Args:
      heads: batch size times query heads, on one device.
      q_seq: number of queries.
      kv_seq: number of keys.
    """
    pairs = _TILE_BYTES // (4 * max(heads, 1))
    rows = max(math.isqrt(pairs // 2), _FEWEST_ROWS)
    keys = max(pairs // max(min(rows, q_seq), 1), _FEWEST_KEYS)

    def evenly(size: int, max_size: int) -> int:
        return math.ceil(size / max(math.ceil(size / max_size), 1))

    return evenly(q_seq, rows), evenly(kv_seq, keys)


def _needed_tiles(
    rows: int, keys: int, sizes: tuple[int, int], window: tuple[int | None, int | None], offset: int
) -> tuple[tuple[int, int], ...]:
    """Returns the tiles with at least one visible pair, with query 0 at key position `offset`."""
    q_seq, kv_seq = sizes
    left, right = window
    needed: list[tuple[int, int]] = []
    for start in range(0, q_seq, rows):
        last = min(start + rows, q_seq) - 1
        first_key = 0 if left is None else max(start + offset - left, 0)
        last_key = kv_seq - 1 if right is None else min(last + offset + right, kv_seq - 1)
        needed += [(start // rows, column) for column in range(first_key // keys, last_key // keys + 1)]
    return tuple(needed)


def _padded(operands: Operands, rows: int, keys: int) -> dict[str, Any]:
    """Pads operands to whole tiles. Padding keys are masked; the caller removes the output of padding queries."""
    query, key = operands["query"], operands["key"]
    # Lengths hide the padding of the keys.
    if key.shape[2] % keys and operands["kv_lengths"] is None:
        operands = {**operands, "kv_lengths": jnp.full(query.shape[0], key.shape[2])}

    def pad(x: Any, axis: int | None, multiple: int) -> Any:
        if x is None or axis is None or x.shape[axis] == 1:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % multiple)
        return jnp.pad(x, widths)

    by_row = {name: pad(x, _QUERY_AXES.get(name), rows) for name, x in operands.items()}
    return {name: pad(x, _KEY_AXES.get(name), keys) for name, x in by_row.items()}


def _with_tile(tiles: _Tiles, state: RunningSoftmax, part: Operands, column: Any) -> RunningSoftmax:
    products = by_group("bhqd,bhkd->bhqk", part["query"], part["key"])
    return add_tile(state, tiles.scores(products, part["bias"], part, column), part["value"])


def _plain_attend(tiles: _Tiles, operands: Operands) -> tuple[Any, Any]:
    def visit(state: RunningSoftmax, row: Any, column: Any) -> RunningSoftmax:
        part = tiles.cut(operands, row, column)
        row_state = RunningSoftmax(*(_part(x, 3, row, tiles.rows) for x in state))
        updated = _with_tile(tiles, row_state, part, column)
        return RunningSoftmax(*(_replaced(x, 3, row, new) for x, new in zip(state, updated, strict=True)))

    return finish(tiles.scan(visit, empty_softmax(operands["query"], operands["value"].shape[3]), operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiles: _Tiles, operands: Operands) -> tuple[Any, Any]:
    return _plain_attend(tiles, operands)


def _attend_forward(tiles: _Tiles, operands: Operands) -> Any:
    output, lse = _attend(tiles, operands)
    return (output, lse), (operands, output, lse)


def _attend_backward(tiles: _Tiles, residuals: Any, cotangents: Any) -> Any:
    """Computes the gradients, with the weights of each tile recomputed from its logits and the lse.

        dz_ij = w_ij (do_i v_j - do_i o_i + dlse_i)        w_ij = exp(z_ij - lse_i)

    The gradients of keys and values are accumulated transposed, [batch, kv_heads, _, keys], from transposed queries
    and output gradients: XLA's CPU backend runs a product that contracts the rows of both operands at a third of the
    speed of other layouts.
    """
    operands, output, lse = residuals
    of_output, of_lse = cotangents
    query = operands["query"]
    dtype, accurate = query.dtype, accurate_dtype(query.dtype)
    by_query = {
        "output": of_output.astype(dtype),
        # Finite in rows without visible keys, where -inf - (-inf) would give NaN weights.
        "lse": jnp.maximum(lse, jnp.finfo(accurate).min),
        # The terms of dz that are equal for all keys of a row.
        "offset": jnp.where(lse > -jnp.inf, of_lse - jnp.sum(of_output * output, axis=-1), 0),
    }
    turned = {"query": query.transpose(0, 1, 4, 2, 3), "output": by_query["output"].transpose(0, 1, 4, 2, 3)}

    def visit(gradients: dict[str, Any], row: Any, column: Any) -> dict[str, Any]:
        part = tiles.cut(operands, row, column)
        row_part = {name: _part(x, 3, row, tiles.rows) for name, x in by_query.items()}
        mine_turned = {name: _part(x, 4, row, tiles.rows) for name, x in turned.items()}
        products = by_group("bhqd,bhkd->bhqk", part["query"], part["key"])
        bias = None if part["bias"] is None else part["bias"].astype(accurate)  # accumulates its gradient in this dtype
        scores, scores_vjp = jax.vjp(lambda products, bias: tiles.scores(products, bias, part, column), products, bias)
        weights = jnp.exp(scores - row_part["lse"][..., None])
        of_weights = by_group("bhqd,bhkd->bhqk", row_part["output"], part["value"])
        of_products, of_bias = scores_vjp(weights * (of_weights + row_part["offset"][..., None]))
        of_products = of_products.astype(dtype)
        added = {
            "query": (by_group("bhqk,bhkd->bhqd", of_products, part["key"]), {3: row}),
            "key": (_over_rows(mine_turned["query"], of_products), {3: column}),
            "value": (_over_rows(mine_turned["output"], weights.astype(dtype)), {3: column}),
            "bias": (of_bias, {3: row, 4: column}),
        }
        return {name: _added(x, *added[name]) for name, x in gradients.items()}

    start = {name: jnp.zeros_like(operands[name].swapaxes(2, 3), accurate) for name in ("key", "value")}
    start["query"] = jnp.zeros(query.shape, accurate)
    if operands["bias"] is not None:
        start["bias"] = jnp.zeros(operands["bias"].shape, accurate)
    gradients = tiles.scan(visit, start, (operands, by_query))
    gradients |= {name: gradients[name].swapaxes(2, 3) for name in ("key", "value")}
    return ({name: gradients[name].astype(x.dtype) if name in gradients else None for name, x in operands.items()},)


_attend.defvjp(_attend_forward, _attend_backward)


def _over_rows(left: Any, right: Any) -> Any:
    """Computes [batch, kv_heads, d, group, rows] @ [batch, kv_heads, group, rows, keys] in fp32."""
    flat_left = left.reshape(*left.shape[:3], -1)
    flat_right = right.reshape(*right.shape[:2], -1, right.shape[-1])
    return contract("bhdq,bhqk->bhdk", flat_left, flat_right, accurate_dtype(left.dtype))


def _part(x: Any, axis: int | None, index: Any, size: int) -> Any:
    if x is None or axis is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _replaced(x: Any, axis: int, index: Any, part: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x, part, index * part.shape[axis], axis)


def _added(x: Any, part: Any, places: Mapping[int, Any]) -> Any:
    """Adds a part at its tile index along each axis; axes of size 1 are shared by all tiles."""
    start = [jnp.zeros((), jnp.int32)] * x.ndim
    for axis, index in places.items():
        if x.shape[axis] > 1:
            start[axis] = index * part.shape[axis]
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, start, part.shape) + part, start)
