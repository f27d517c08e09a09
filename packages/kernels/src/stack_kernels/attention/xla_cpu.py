"""`attention` on CPUs: one or a few batch rows at a time, which keeps the working set in the caches."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.mesh import parts_of
from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.ops.building import differentiated, joined_by_sinks, vary_alike
from stack_kernels.attention.few_queries import are_few, attend_few
from stack_kernels.attention.tiles import Operands, Tiles, attend, attend_one_tile, gradients
from stack_kernels.cpu import as_bits, from_bits

__all__ = ["XLA_CPU", "TileConfig"]

_MIN_KEYS = 128
_MULTIPLE = 16
_KEYS_OF_FEW = 512
_MANY_KEYS = 512


@dataclass(frozen=True)
class TileConfig:
    """Sizes of the tiles of scores.

    Attributes:
      rows: maximum number of queries per tile, for each head.
      tile_bytes: bytes of the scores in memory at a time, over all heads of the current batch rows.
    """

    rows: int = 128
    tile_bytes: int = 2**21


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    sinks: Any,
    return_lse: bool,
    query_offset: Any,
    config: TileConfig,
    requested: frozenset[str],
    **call: Any,
) -> Any:
    offset = query_offset if isinstance(query_offset, int) else None
    q_segments, kv_segments = call["segment_ids"] or (None, None)
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "q_segments": q_segments,
        "kv_segments": kv_segments,
        "query_offset": query_offset if offset is None else None,
        **{name: call[name] for name in ("bias", "mask", "kv_lengths")},
    }
    # A KV cache is longer than its used part and may be stored head-major; such keys are read tile by tile.
    few = are_few(*query.shape[1:3])
    at_once = few and offset is not None and call["kv_lengths"] is None
    rows, keys, batch_rows = _sizes(query, key, config)
    if few:
        # All batch rows at once: reading the keys dominates the time, however the scores are divided.
        keys, batch_rows = key.shape[1] if at_once else min(keys, _KEYS_OF_FEW), query.shape[0]
    left, right = call["window"] or (None, None)
    window = (left, 0 if call["causal"] else right)
    tiles = Tiles(rows, keys, window, offset, call["scale"], call["softcap"])
    output, lse = _attention(tiles, at_once, batch_rows, vary_alike(operands)[0])
    if sinks is not None:
        share, lse = joined_by_sinks(lse, sinks)
        output = output * share[..., None].astype(output.dtype)
    return (output, lse) if return_lse else output, {"lse": lse}


def _sizes(query: Any, key: Any, config: TileConfig) -> tuple[int, int, int]:
    """Returns the rows and keys per tile, and the number of batch rows per iteration.

    A batch that is split over devices is not looped over, because each step would run on one device only.
    """
    batch, q_seq, heads, _ = query.shape
    kv_seq = key.shape[1]
    rows = _evenly(q_seq, config.rows)
    # Pairs of a head and a key whose fp32 scores with all rows of a tile fit its bytes.
    pairs = config.tile_bytes // (4 * rows)
    min_batch_rows = batch if parts_of("batch") > 1 else 1
    fitting = pairs // (heads * min(kv_seq, 4 * _MIN_KEYS))
    if rows == q_seq and batch <= 2 * fitting:
        fitting = batch  # one block: no loop and no copies of its results
    batch_rows = max(
        count
        for count in range(min_batch_rows, batch + 1)
        if batch % count == 0 and count <= max(fitting, min_batch_rows)
    )
    # Over the batch rows of an iteration, on one device.
    heads_at_a_time = math.ceil(batch_rows * heads / (parts_of("batch") * parts_of("act_heads")))
    return rows, _evenly(kv_seq, max(pairs // heads_at_a_time, _MIN_KEYS)), batch_rows


def _evenly(size: int, limit: int) -> int:
    """Returns the size of equal parts of at most `limit`, rounded up to a multiple of the vector size."""
    parts = math.ceil(size / limit)
    return size if parts == 1 else math.ceil(size / parts / _MULTIPLE) * _MULTIPLE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(tiles: Tiles, at_once: bool, batch_rows: int, operands: Operands) -> tuple[Any, Any]:
    """Computes the output [batch, q_seq, heads, value_dim] and the lse [batch, q_seq, heads] in fp32."""

    def attended(part: Operands) -> tuple[Any, Any]:
        operands = _head_major(tiles, part)
        found = attend_few(tiles, operands, part["key"], part["value"]) if at_once else attend(tiles, operands)
        return _in_token_order(part["query"], *found), {}

    return _over_batch(attended, batch_rows, operands)[0]


def _in_token_order(query: Any, output: Any, lse: Any) -> tuple[Any, Any]:
    shape = query.shape[:3]
    return _token_major(output, (*shape, output.shape[-1]), query.dtype), _token_major(lse, shape, lse.dtype)


def _forward(tiles: Tiles, at_once: bool, batch_rows: int, operands: Operands) -> Any:
    if at_once or not tiles.keeps_weights(operands["query"], operands["key"]):
        output, lse = _attention(tiles, at_once, batch_rows, operands)
        return (output, lse), (operands, output, lse, None)

    def attended(part: Operands) -> tuple[Any, Any]:
        output, lse, weights = attend_one_tile(tiles, _head_major(tiles, part))
        return (*_in_token_order(part["query"], output, lse), weights), {}

    output, lse, weights = _over_batch(attended, batch_rows, operands)[0]
    return (output, lse), (operands, None, lse, weights)


def _backward(tiles: Tiles, at_once: bool, batch_rows: int, residuals: Any, cotangents: Any) -> Any:
    operands, output, lse, weights = residuals
    results = {"lse": lse, "of_output": cotangents[0], "of_lse": cotangents[1]}
    if output is not None:
        results["output"] = output

    def differentiated(part: Operands) -> tuple[Operands, Operands]:
        dtype, kv_heads = query.dtype, key.shape[2]
        results_by_group = {
            name: _padded(_by_group(part[name], kv_heads), 3, tiles.rows, tiles, query.shape[1]) for name in results
        }
        found = gradients(tiles, _head_major(tiles, part), weights=part["weights"], **results_by_group)
        stacked = {
            "query": _token_major(found["query"], part["query"].shape, dtype),
            "key": found["key"].swapaxes(1, 2)[:, : key.shape[1]].astype(dtype),
            "value": found["value"].swapaxes(1, 2)[:, : key.shape[1]].astype(dtype),
        }
        if bias is None:
            return stacked, {}
        # From [batch, kv_heads, group, rows, keys] to [batch, heads, q_seq, kv_seq], without padding.
        of_bias = found["bias"].reshape(found["bias"].shape[0], -1, *found["bias"].shape[3:])
        of_bias = of_bias[:, :, : bias.shape[2], : bias.shape[3]]
        # A bias that all batch rows share has the sum of their gradients.
        return ({**stacked, "bias": of_bias}, {}) if bias.shape[0] == query.shape[0] else (stacked, {"bias": of_bias})

    query, key, bias = operands["query"], operands["key"], operands["bias"]
    stacked, sums = _over_batch(differentiated, batch_rows, {**operands, **results, "weights": weights})
    found = {**stacked, **sums}
    return ({name: found[name].astype(x.dtype) if name in found else None for name, x in operands.items()},)


_attention.defvjp(_forward, _backward)


def _over_batch(function: Callable[[Operands], Any], batch_rows: int, operands: Operands) -> Any:
    """Calls `function` on a few batch rows at a time; returns stacked results [batch, ...] and summed results.

    Args:
      function: returns the pair (results per row, results to sum). Operands whose batch axis is missing or of size 1
        are passed unsplit.
      batch_rows: number of rows per call; divides the batch.
      operands: arguments of the function by name.
    """
    batch = operands["query"].shape[0]
    if batch_rows == batch:
        return function(operands)
    moving = {name: x for name, x in operands.items() if x is not None and x.shape[0] == batch}
    fixed = {name: x for name, x in operands.items() if name not in moving}

    def of_part(part: Operands) -> tuple[Any, Any]:
        return function({**fixed, **{name: from_bits(x, moving[name].dtype) for name, x in part.items()}})

    def visit(total: Any, part: Operands) -> tuple[Any, Any]:
        stacked, added = of_part(part)
        return jax.tree.map(jnp.add, total, added), jax.tree.map(as_bits, stacked)

    parts = {name: as_bits(x.reshape(-1, batch_rows, *x.shape[1:])) for name, x in moving.items()}
    shapes, added = jax.eval_shape(of_part, {name: x[0] for name, x in parts.items()})
    # The carry of a scan must vary over the mesh axes of the operands from the start.
    start = vary_alike(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), added), operands)[0]
    total, stacked = lax.scan(visit, start, parts)
    full = jax.tree.map(lambda x, shape: from_bits(x, shape.dtype).reshape(batch, *x.shape[2:]), stacked, shapes)
    return full, total


def _head_major(tiles: Tiles, part: Operands) -> dict[str, Any]:
    """Converts the operands to the form of `tiles`, padded to full tiles with the padding keys masked."""
    batch, q_seq = part["query"].shape[:2]
    kv_seq, kv_heads = part["key"].shape[1:3]
    rows = functools.partial(_padded, multiple=tiles.rows, tiles=tiles, q_seq=q_seq)
    lengths = part["kv_lengths"]
    if kv_seq % tiles.keys and lengths is None:
        lengths = jnp.full(batch, kv_seq)
    query = rows(_by_group(part["query"], kv_heads), 3)
    offset: Any = tiles.offset if part["query_offset"] is None else part["query_offset"][:, None]
    return {
        "query": query,
        "key": _padded(part["key"].swapaxes(1, 2), 2, tiles.keys),
        "value": _padded(part["value"].swapaxes(1, 2), 2, tiles.keys),
        "query_positions": jnp.arange(query.shape[3])[None, :] + offset,
        "q_segments": rows(part["q_segments"], 1),
        "kv_segments": _padded(part["kv_segments"], 1, tiles.keys),
        "kv_lengths": lengths,
        **{name: _padded(rows(_grouped(part[name], kv_heads), 3), 4, tiles.keys) for name in ("bias", "mask")},
    }


def _by_group(x: Any, kv_heads: int) -> Any:
    """Converts [batch, seq, heads, ...] to [batch, kv_heads, group, seq, ...]."""
    grouped = x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, *x.shape[3:])
    return jnp.moveaxis(grouped, 1, 3)


def _grouped(x: Any, kv_heads: int) -> Any:
    """Converts [batch, heads, q_seq, kv_seq] to [batch, kv_heads, group, q_seq, kv_seq]; a head axis of 1 stays 1."""
    if x is None or x.shape[1] == 1:
        return None if x is None else x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _token_major(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Inverts `_by_group`, dropping padding rows, with the given shape and dtype."""
    return jnp.moveaxis(x[:, :, :, : shape[1]].astype(dtype), 3, 1).reshape(shape)


def _padded(x: Any, axis: int, multiple: int, tiles: Tiles | None = None, q_seq: int = 0) -> Any:
    """Zero-pads an axis to a multiple, unless its size is 1 or its blocks are unrolled."""
    if x is None or x.shape[axis] == 1 or x.shape[axis] % multiple == 0 or (tiles and tiles.laid_out(q_seq)):
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


_LARGE = TileConfig(rows=1024, tile_bytes=2**22)
_CONFIGS = (TileConfig(), TileConfig(rows=64), TileConfig(rows=256), TileConfig(tile_bytes=2**23), _LARGE)


def _default(call: OpCall, chip: Any) -> TileConfig:
    """Returns large tiles if every query sees many keys: they take 0.6 to 0.9 of the time.

    With causality or a window they would compute scores that are masked.
    """
    sees_all = not call.options["causal"] and call.options["window"] is None
    return _LARGE if sees_all and call.arrays["key"].shape[1] >= _MANY_KEYS else _CONFIGS[0]


_forward_pass, _backward_pass = differentiated(_call)

XLA_CPU = OpImplementation(
    op="attention",
    name="xla_cpu",
    forward=_forward_pass,
    backward=_backward_pass,
    platforms=("cpu",),
    default=_default,
    space=lambda call, chip: _CONFIGS,
    residuals=("lse", OWN),
)
