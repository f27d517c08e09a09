"""Minimal work of an op call: FLOPs by the op's equation, bytes of its operands and results.

The convention follows `stack_core.programs.flops`: products count, elementwise work does not. A backward pass counts
each product of the forward pass twice, plus once more for results that no implementation can store: the scores of
attention and the logits of a loss. Every operand is read once and every result is written once.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import OpCall
from stack_core.chips import Chip
from stack_core.ops.defining import op_named
from stack_core.programs.flops import count_flops

__all__ = ["Bound", "Work", "work_of"]


@dataclass(frozen=True)
class Bound:
    """Shortest time that a chip's peaks allow.

    Attributes:
      seconds: max(flops / peak, bytes / bandwidth).
      denominator: the peak that limits the call, such as "390 GFLOP/s bfloat16".
    """

    seconds: float
    denominator: str


@dataclass(frozen=True)
class Work:
    """FLOPs of dense products, dtype of their operands, and bytes moved to and from memory."""

    flops: int
    dtype: str
    traffic_bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.dtype, self.traffic_bytes + other.traffic_bytes)

    def bound(self, chip: Chip) -> Bound | None:
        """Returns the roofline bound on a chip, or None if a peak that it needs is unknown."""
        peak, bandwidth = chip.peak_flops.get(self.dtype), chip.hbm_bandwidth_bytes_s
        # A call without products needs no peak.
        if bandwidth is None or (peak is None and self.flops):
            return None
        moving_s = self.traffic_bytes / bandwidth
        computing_s = self.flops / peak if peak is not None else 0.0
        if computing_s > moving_s:
            return Bound(computing_s, f"{_rate(self.flops / computing_s)}FLOP/s {self.dtype}")
        return Bound(moving_s, f"{_rate(bandwidth)}B/s")


def _rate(rate: float) -> str:
    """Formats a rate with three digits and a prefix: "54.7 G"."""
    prefix, unit = ("T", 1e12) if rate >= 1e12 else ("G", 1e9)
    return f"{rate / unit:.3g} {prefix}"


def work_of(call: OpCall, values: Mapping[str, Any] | None = None) -> Work:
    """Returns the minimal work of one direction of a call.

    For `collective_matmul`, the work on a mesh of one device.

    Args:
      call: the call, with arrays or `jax.ShapeDtypeStruct`.
      values: integer arrays by parameter name that determine the amount of work, such as `group_sizes` or `kv_lengths`;
        without them, the maximum that the shapes allow.
    """
    arrays = {name: array for name, array in call.arrays.items() if array is not None}
    backward = call.direction == "backward"
    if call.op in _FLOPS:
        flops = _FLOPS[call.op](arrays, call.options, values or {}, backward)
        result_bytes = _RESULT_BYTES[call.op](arrays, call.options)
    else:  # an op defined by a plugin
        reference = functools.partial(_reference, call)
        flops = sum(count_flops(reference, dict(call.arrays)).by_dtype.values()) * (2 if backward else 1)
        result_bytes = _bytes(jax.eval_shape(reference, dict(call.arrays)))
    operands = {name: _bytes(array) for name, array in arrays.items()}
    operands |= _used_pages_bytes(arrays, call.options, values or {}) if call.op == "paged_attention" else {}
    traffic_bytes = sum(operands.values()) + result_bytes
    if backward:
        # Each floating operand has a gradient of equal size; the result's bytes stand for the cotangent.
        traffic_bytes += sum(operands[name] for name, array in arrays.items() if _is_floating(array))
    return Work(flops, _product_dtype(arrays), traffic_bytes)


def _reference(call: OpCall, arrays: Mapping[str, Any]) -> Any:
    return op_named(call.op).implementation().forward(**arrays, **call.options, requested=frozenset())[0]


def _bytes(array: Any) -> int:
    return sum(math.prod(leaf.shape) * _bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(array))


def _bits(dtype: Any) -> int:
    # `itemsize` counts a byte for types of 4 bits.
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * jnp.dtype(dtype).itemsize


def _is_floating(array: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array))


def _logical(array: Any) -> Any:
    """Returns an array, or a shape struct, with the logical shape of an array that may be quantized."""
    if not hasattr(type(array), "__stack_qview__"):
        return array
    return jax.eval_shape(lambda array: array.__stack_qview__().qvalue, array)


def _product_dtype(arrays: Mapping[str, Any]) -> str:
    """Returns the dtype of the products: an integer dtype only if both operands are integers."""
    # The factors: each op's parameters begin with both operands of its product.
    dtypes = [jnp.dtype(_logical(array).dtype) for array in list(arrays.values())[:2]]
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    if not floating:
        return "int8" if all(_bits(dtype) <= 8 for dtype in dtypes) else dtypes[0].name
    return max(floating, key=lambda dtype: dtype.itemsize).name


def _pairs(arrays: Mapping[str, Any], options: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Counts the (query, key) pairs that causality and the window allow, over batch rows and heads."""
    batch, q_seq, heads, _ = arrays["query"].shape
    kv_seq = arrays["key"].shape[1]
    left, right = options["window"] or (None, None)
    right = 0 if options["causal"] else right
    # An array, an option, or an array of unknown content: then the last query is at the last key.
    offsets = np.broadcast_to(values.get("query_offset", options.get("query_offset", kv_seq - q_seq)), batch)
    ends = np.broadcast_to(values.get("kv_lengths", kv_seq), batch)
    places = np.arange(q_seq) + offsets[:, None]
    last = ends[:, None] if right is None else np.minimum(places + right + 1, ends[:, None])
    first = 0 if left is None else np.maximum(places - left, 0)
    return int(np.maximum(np.broadcast_to(last, places.shape) - first, 0).sum() * heads)


def _attention_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    return _pairs(arrays, options, values) * _pair_flops(arrays["query"].shape[-1], arrays["value"].shape[-1], backward)


def _pair_flops(key_dim: int, value_dim: int, backward: bool) -> int:
    """FLOPs per (query, key) pair: forward q k and w v; backward q k again, and the gradients of q, k, v and w."""
    return 6 * key_dim + 4 * value_dim if backward else 2 * (key_dim + value_dim)


def _keys_of_sequences(arrays: Any, options: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of queries and of keys of each sequence."""
    slots = _logical(arrays["key_pages"]).shape[options["layout"].index("s")]
    batch, pages_per_seq = arrays["block_tables"].shape
    starts = values.get("query_starts")
    queries = np.full(batch, arrays["query"].shape[0] // max(batch, 1)) if starts is None else np.diff(starts)
    return queries, np.broadcast_to(values.get("kv_lengths", pages_per_seq * slots), batch)


def _paged_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    queries, lengths = _keys_of_sequences(arrays, options, values)
    window = (options["window"] or (None, None))[0]
    pairs = 0
    for count, length in zip(queries, lengths, strict=True):
        seen = np.maximum(length - count + np.arange(count) + 1, 0)
        pairs += int((seen if window is None else np.minimum(seen, window + 1)).sum())
    _, heads, head_dim = arrays["query"].shape
    return pairs * heads * _pair_flops(head_dim, _paged_value_dim(arrays, options), backward)


def _paged_value_dim(arrays: Any, options: Any) -> int:
    return options["value_dim"] or _logical(arrays.get("value_pages", arrays["key_pages"])).shape[-1]


def _used_pages_bytes(arrays: Any, options: Any, values: Any) -> dict[str, int]:
    """Bytes read from the page pools: pages with keys of sequences that have queries."""
    queries, lengths = _keys_of_sequences(arrays, options, values)
    used = int(lengths[queries > 0].sum())

    def read(pages: Any) -> int:
        sizes = dict(zip(options["layout"], _logical(pages).shape, strict=True))
        # Sequences may share pages, so their keys may be more than the pool.
        return min(_bytes(pages) * used // max(sizes["p"] * sizes["s"], 1), _bytes(pages))

    return {name: read(arrays[name]) for name in ("key_pages", "value_pages") if name in arrays}


def _rows(array: Any) -> int:
    return math.prod(_logical(array).shape[:-1])


def _linear_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options, values
    x, weight = arrays["x"], arrays["weight"]
    operands = sum(_is_floating(_logical(array)) for array in (x, weight)) if backward else 1
    return 2 * operands * _rows(x) * math.prod(_logical(weight).shape)


def _ragged_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options
    rows, _ = arrays["lhs"].shape
    rows = min(int(np.sum(values["group_sizes"])), rows) if "group_sizes" in values else rows
    operands = 1 + _is_floating(_logical(arrays["rhs"])) if backward else 1
    return 2 * operands * rows * math.prod(_logical(arrays["rhs"]).shape[1:])


def _gated_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options, values
    weights = [_logical(arrays[name]) for name in ("w_gate", "w_up")]
    operands = [1 + _is_floating(weight) if backward else 1 for weight in weights]
    sizes = [math.prod(weight.shape) for weight in weights]
    return 2 * _rows(arrays["x"]) * sum(count * size for count, size in zip(operands, sizes, strict=True))


def _loss_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options, values
    weight = _logical(arrays["weight"])
    # Backward: the logits again, the gradient of the hidden states, and the weight's gradient if it has one.
    operands = 2 + _is_floating(weight) if backward else 1
    return 2 * operands * _rows(arrays["hidden"]) * math.prod(weight.shape)


def _low_rank_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options
    rows = _rows(arrays["x"])
    if "rows" in values:  # [...], shaped as the first of the leading axes of x
        rows = rows * int(np.sum(values["rows"] >= 0)) // max(values["rows"].size, 1)
    (_, d_in, rank), d_out = arrays["down"].shape, arrays["up"].shape[-1]
    return 2 * (2 if backward else 1) * rows * rank * (d_in + d_out)


def _linear_attention_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options, values
    # Three products per token and head: the state by the key, its update by key and value, the state by the query.
    return (12 if backward else 6) * math.prod(arrays["key"].shape) * arrays["value"].shape[-1]


def _state_space_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del options, values
    # Two products per token and head: the state's update by key and value, the state by the query.
    return (8 if backward else 4) * math.prod(arrays["value"].shape) * arrays["key"].shape[-1]


def _no_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    del arrays, options, values, backward
    return 0


def _ring_flops(arrays: Any, options: Any, values: Any, backward: bool) -> int:
    """FLOPs of one ring step: the local queries against the keys of one device."""
    del options, values
    batch, q_seq, heads, key_dim = arrays["query"].shape
    pairs = batch * q_seq * heads * arrays["key"].shape[1]
    return pairs * _pair_flops(key_dim, arrays["value"].shape[-1], backward)


_FLOPS: Mapping[str, Callable[[Any, Any, Any, bool], int]] = {
    "attention": _attention_flops,
    "collective_matmul": _linear_flops,
    "exchange": _no_flops,
    "gated_linear_unit": _gated_flops,
    "linear": _linear_flops,
    "linear_attention": _linear_attention_flops,
    "linear_cross_entropy": _loss_flops,
    "low_rank": _low_rank_flops,
    "norm": _no_flops,
    "paged_attention": _paged_flops,
    "ragged_dot": _ragged_flops,
    "ring_attention": _ring_flops,
    "rope": _no_flops,
    "state_space": _state_space_flops,
}


def _product_bytes(arrays: Any, options: Any, rows: str = "x", weight: str = "weight") -> int:
    dtype = options["preferred_dtype"] if "preferred_dtype" in options else arrays[rows].dtype
    return _rows(arrays[rows]) * _logical(arrays[weight]).shape[-1] * jnp.dtype(dtype).itemsize


_RESULT_BYTES: Mapping[str, Callable[[Any, Any], int]] = {
    "attention": lambda arrays, options: (
        _rows(arrays["query"]) * arrays["value"].shape[-1] * arrays["value"].dtype.itemsize
    ),
    "collective_matmul": _product_bytes,
    "exchange": lambda arrays, options: options["out_rows"] * arrays["x"].shape[1] * arrays["x"].dtype.itemsize,
    "gated_linear_unit": lambda arrays, options: _product_bytes(arrays, options, weight="w_up"),
    "linear": _product_bytes,
    "linear_attention": lambda arrays, options: _bytes(arrays["value"]),
    "linear_cross_entropy": lambda arrays, options: 4,
    "low_rank": lambda arrays, options: _product_bytes(arrays, options, weight="up"),
    "norm": lambda arrays, options: _bytes(arrays["x"]) * (1 + ("residual" in arrays)),
    "paged_attention": lambda arrays, options: (
        _rows(arrays["query"]) * _paged_value_dim(arrays, options) * arrays["query"].dtype.itemsize
    ),
    "ragged_dot": lambda arrays, options: _product_bytes(arrays, options, "lhs", "rhs"),
    "ring_attention": lambda arrays, options: (
        _rows(arrays["query"]) * arrays["value"].shape[-1] * arrays["value"].dtype.itemsize
    ),
    "rope": lambda arrays, options: _bytes(arrays["x"]),
    "state_space": lambda arrays, options: _bytes(arrays["value"]),
}
