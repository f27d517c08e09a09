"""Realistic random operands for a call, given only its shapes and dtypes.

Labels are within the vocabulary, group sizes add up to the rows, block tables name existing pages, and segments are
contiguous. Lengths are between half the capacity and all of it, which gives kernels some padding to skip.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import OpCall
from stack_core.ops.building import is_quantized

__all__ = ["draw_operands", "normal"]

_SEGMENTS = 4
_ALLOWED_SHARE = 0.9
_IGNORED_SHARE = 0.05
_LOGICAL_SCALE = 0.02  # scale of dequantized values, similar to weights

_WITHOUT_ADAPTER_SHARE = 0.25

# Sampling a billion values on the host takes many seconds. The odd length shifts the repetition from row to row.
_MAX_SAMPLES = 2**22 + 1

_Maker = Callable[[Any, OpCall, np.random.Generator], Any]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Samples a float32 array from the standard normal distribution; beyond 2**22 + 1 values the samples repeat."""
    size = math.prod(shape)
    if size <= _MAX_SAMPLES:
        return rng.standard_normal(shape, np.float32)
    return np.resize(rng.standard_normal((_MAX_SAMPLES,), np.float32), shape)


def draw_operands(call: OpCall, seed: int = 0) -> dict[str, Any]:
    """Samples arrays for the array arguments of a call, by name; deterministic in the seed."""
    rng = np.random.default_rng(seed)
    makers = _MAKERS.get(call.op, {})
    return {
        name: None if struct is None else makers.get(name, _plain)(struct, call, rng)
        for name, struct in call.arrays.items()
    }


def _plain(struct: Any, call: OpCall, rng: np.random.Generator) -> Any:
    """Samples an argument without rules of its own: standard normal, or random codes with positive scales, or bits."""
    draw = _code_or_scale if is_quantized(struct) else _leaf
    return jax.tree.map(lambda leaf: draw(leaf, rng), struct)


def _leaf(struct: Any, rng: np.random.Generator) -> jax.Array:
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return jnp.asarray(normal(rng, struct.shape), struct.dtype)
    return _integers(struct, rng)


def _code_or_scale(struct: Any, rng: np.random.Generator) -> jax.Array:
    """Samples a leaf of a quantized array: integers over the full range, or positive scales and codebooks."""
    if jnp.issubdtype(struct.dtype, jnp.floating):
        values = rng.uniform(0.5, 1.5, struct.shape) * (_LOGICAL_SCALE if struct.dtype.itemsize > 1 else 1.0)
        return jnp.asarray(values.astype(np.float32), struct.dtype)
    return _integers(struct, rng)


def _integers(struct: Any, rng: np.random.Generator) -> jax.Array:
    if struct.dtype == jnp.bool_:
        return jnp.asarray(rng.random(struct.shape) < _ALLOWED_SHARE)
    info = jnp.iinfo(struct.dtype)
    low, high = max(int(info.min), -(2**15)), min(int(info.max), 2**15)
    return jnp.asarray(rng.integers(low, high, struct.shape, np.int32, endpoint=True)).astype(struct.dtype)


def _labels(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    vocab = _logical_shape(call.arrays["weight"])[1]
    labels = rng.integers(0, max(vocab, 1), struct.shape)
    return jnp.asarray(
        np.where(rng.random(struct.shape) < _IGNORED_SHARE, call.options["ignore_index"], labels)
    ).astype(struct.dtype)


def _group_sizes(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    groups, rows = struct.shape[0], call.arrays["lhs"].shape[0]
    return jnp.asarray(rng.multinomial(rows, np.full(groups, 1 / groups))).astype(struct.dtype)


def _adapters(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    adapters = rng.integers(0, call.arrays["scale"].shape[0], struct.shape)
    return jnp.asarray(np.where(rng.random(struct.shape) < _WITHOUT_ADAPTER_SHARE, -1, adapters)).astype(struct.dtype)


def _segments(struct: Any, call: OpCall, rng: np.random.Generator) -> Any:
    """Returns segment ids of queries and keys: equal parts, in order; each segment has queries and keys."""

    def ids(one: Any) -> jax.Array:
        row = 1 + np.arange(one.shape[1]) * _SEGMENTS // max(one.shape[1], 1)
        return jnp.asarray(np.broadcast_to(row, one.shape)).astype(one.dtype)

    return jax.tree.map(ids, struct)


def _kv_lengths(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    return _lengths(struct, call.arrays["key"].shape[1], rng)


def _lengths(struct: Any, longest: int, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.integers((longest + 1) // 2, longest, struct.shape, endpoint=True)).astype(struct.dtype)


def _query_offset(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    last = call.arrays["key"].shape[1] - call.arrays["query"].shape[1]
    return jnp.full(struct.shape, max(last, 0), struct.dtype)


def _slots(call: OpCall) -> int:
    return _logical_shape(call.arrays["key_pages"])[call.options["layout"].index("s")]


def _paged_lengths(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    return _lengths(struct, call.arrays["block_tables"].shape[1] * _slots(call), rng)


def _block_tables(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    """Assigns pages in random order; if the pool has fewer pages than the tables have entries, sequences share some."""
    pages = _logical_shape(call.arrays["key_pages"])[call.options["layout"].index("p")]
    numbers = np.resize(rng.permutation(max(pages, 1)), struct.shape)
    return jnp.asarray(numbers).astype(struct.dtype)


def _query_starts(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    """Gives each sequence equally many queries, at most its shortest possible length; remaining rows are padding."""
    batch, tokens = struct.shape[0] - 1, call.arrays["query"].shape[0]
    fewest_keys = (call.arrays["block_tables"].shape[1] * _slots(call) + 1) // 2
    queries = min(tokens // max(batch, 1), fewest_keys)
    return jnp.arange(batch + 1, dtype=struct.dtype) * queries


def _unit(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    values = rng.standard_normal(struct.shape, np.float32)
    # The state of the delta rule grows without bound if beta times the squared norm of a key exceeds 2.
    return jnp.asarray(values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-6), struct.dtype)


def _decay(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(-rng.exponential(0.1, struct.shape).astype(np.float32), struct.dtype)


def _share(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.uniform(0, 1, struct.shape).astype(np.float32), struct.dtype)


def _positions(struct: Any, call: OpCall, rng: np.random.Generator) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(struct.shape[-1], dtype=struct.dtype), struct.shape)


def _logical_shape(array: Any) -> tuple[int, ...]:
    if not is_quantized(array):
        return array.shape
    return jax.eval_shape(lambda array: array.__stack_qview__().qvalue, array).shape


_MAKERS: Mapping[str, Mapping[str, _Maker]] = {
    "attention": {"segment_ids": _segments, "kv_lengths": _kv_lengths, "query_offset": _query_offset},
    "linear_attention": {"query": _unit, "key": _unit, "decay": _decay, "beta": _share},
    "linear_cross_entropy": {"labels": _labels},
    "low_rank": {"rows": _adapters},
    "paged_attention": {
        "block_tables": _block_tables,
        "kv_lengths": _paged_lengths,
        "query_starts": _query_starts,
    },
    "ragged_dot": {"group_sizes": _group_sizes},
    "rope": {"positions": _positions},
    "state_space": {"decay": _decay, "beta": _share},
}
"""Arguments that need more than arbitrary numbers."""
