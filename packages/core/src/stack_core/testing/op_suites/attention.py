"""The contract suite of `attention`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.ops.definitions.attention import PackedSegments
from stack_core.testing.cases import OpCase, OpSuite, in_tiles, integers, spoiled

__all__ = ["SUITE"]


def _attention_case(
    name: str,
    *,
    sizes: tuple[int, int, int, int, int, int] = (2, 5, 7, 4, 2, 8),
    value_dim: int | None = None,
    extra: Callable[[np.random.Generator], Mapping[str, Any]] = lambda rng: {},
    **options: Any,
) -> OpCase:
    """Builds a case; `sizes` are (batch, q_seq, kv_seq, heads, kv_heads, key_dim), `value_dim` defaults to key_dim."""
    batch, q_seq, kv_seq, heads, kv_heads, key_dim = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {
            "query": rng.normal(size=(batch, q_seq, heads, key_dim)),
            "key": rng.normal(size=(batch, kv_seq, kv_heads, key_dim)),
            "value": rng.normal(size=(batch, kv_seq, kv_heads, value_dim or key_dim)),
            **extra(rng),
        }

    return OpCase("attention", name, arrays, options)


_SEGMENTS = integers([1, 1, 2, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3, 0])

_PACKED = integers([1, 1, 2, 2, 2, 0, 0], [1, 3, 3, 2, 2, 2, 0])

_CASES = (
    _attention_case("plain"),
    _attention_case("causal", causal=True),
    _attention_case("one_query", sizes=(3, 1, 9, 6, 3, 8), causal=True),
    _attention_case("odd_sizes", sizes=(1, 131, 67, 3, 1, 20), causal=True, query_offset=3),
    _attention_case("more_queries_than_keys", sizes=(2, 7, 3, 2, 2, 8), causal=True, return_lse=True),
    _attention_case("offset_per_row", causal=True, extra=lambda rng: {"query_offset": integers(0, -3)}),
    _attention_case("window", window=(2, 1), query_offset=1),
    _attention_case("window_and_more_keys", sizes=(2, 3, 11, 4, 2, 8), window=(3, 1)),
    _attention_case("window_and_more_queries", sizes=(1, 9, 4, 4, 2, 8), window=(2, 0), return_lse=True),
    _attention_case("left_window", window=(2, None), causal=True, return_lse=True),
    _attention_case("bias", extra=lambda rng: {"bias": rng.normal(size=(2, 4, 5, 7))}),
    _attention_case("broadcast_bias", extra=lambda rng: {"bias": rng.normal(size=(1, 4, 1, 7))}, causal=True),
    _attention_case(
        "mask",
        extra=lambda rng: {"mask": rng.random((2, 1, 5, 7)) < 0.5 * (np.arange(5) > 0)[:, None]},
        return_lse=True,
    ),
    _attention_case("mask_per_head", extra=lambda rng: {"mask": rng.random((1, 4, 5, 7)) < 0.4}),
    _attention_case("segments", sizes=(2, 7, 7, 4, 4, 8), causal=True, extra=lambda rng: {"segment_ids": _SEGMENTS}),
    _attention_case(
        "packed_segments",
        sizes=(2, 7, 7, 4, 2, 8),
        causal=True,
        extra=lambda rng: {"segment_ids": PackedSegments.of(_PACKED)},
    ),
    _attention_case(
        "segment_pair", extra=lambda rng: {"segment_ids": (_SEGMENTS[:, 1:6] + 1, _SEGMENTS)}, return_lse=True
    ),
    _attention_case("kv_lengths", extra=lambda rng: {"kv_lengths": integers(5, 0)}, return_lse=True),
    _attention_case("softcap", softcap=1.5, causal=True),
    _attention_case("sinks", extra=lambda rng: {"sinks": rng.normal(size=4)}, causal=True, return_lse=True),
    _attention_case(
        "sinks_and_empty_rows", extra=lambda rng: {"sinks": rng.normal(size=4), "kv_lengths": integers(0, 3)}
    ),
    _attention_case("scale", scale=0.7),
    _attention_case("narrow_values", sizes=(2, 9, 13, 4, 4, 12), value_dim=8, causal=True, return_lse=True),
    _attention_case("wide_values", sizes=(2, 1, 9, 4, 2, 4), value_dim=20),
    _attention_case(
        "everything",
        sizes=(2, 7, 7, 4, 2, 8),
        value_dim=5,
        extra=lambda rng: {
            "bias": rng.normal(size=(2, 1, 7, 7)),
            "mask": rng.random((1, 1, 7, 7)) < 0.8,
            "segment_ids": _SEGMENTS,
            "kv_lengths": integers(5, 6),
            "sinks": rng.normal(size=4),
            "query_offset": integers(1, 0),
        },
        causal=True,
        window=(3, None),
        softcap=2.0,
        scale=0.5,
        return_lse=True,
    ),
    spoiled(
        _attention_case("", causal=True, return_lse=True),
        "not_a_number",
        query=((0, 2, 3), np.nan),
        key=((1, 0, 1), np.nan),
        value=((0, 0, 0, 5), np.nan),
    ),
    spoiled(_attention_case("", causal=True), "infinity", query=((0, 2, 3), np.inf), value=((1, 0, 1, 5), -np.inf)),
)

_ACCELERATOR_SEGMENTS = integers(np.repeat([1, 2, 3, 4, 0], (100, 29, 1, 50, 12)), np.repeat([5, 6, 0], (64, 127, 1)))
"""Segments that end inside blocks of 64 keys, and before and after one."""

_FOR_ACCELERATORS = in_tiles(
    _attention_case("full", sizes=(2, 192, 192, 2, 2, 64)),
    _attention_case("causal_and_grouped", sizes=(1, 192, 192, 4, 2, 128), causal=True),
    _attention_case("causal_window", sizes=(1, 192, 192, 2, 1, 64), causal=True, window=(63, 0)),
    _attention_case(
        "partial_segments",
        sizes=(2, 192, 192, 2, 2, 64),
        causal=True,
        extra=lambda rng: {"segment_ids": _ACCELERATOR_SEGMENTS},
    ),
    _attention_case(
        "packed_segments",
        sizes=(2, 192, 192, 2, 2, 64),
        causal=True,
        extra=lambda rng: {"segment_ids": PackedSegments.of(_ACCELERATOR_SEGMENTS)},
    ),
    _attention_case(
        "packed_segments_in_a_window",
        sizes=(2, 64, 192, 2, 1, 128),
        causal=True,
        window=(40, 0),
        extra=lambda rng: {"segment_ids": PackedSegments(_ACCELERATOR_SEGMENTS[:, 128:], _ACCELERATOR_SEGMENTS)},
    ),
    _attention_case(
        "packed_segments_to_both_sides",
        sizes=(2, 192, 192, 2, 2, 128),
        extra=lambda rng: {"segment_ids": PackedSegments.of(_ACCELERATOR_SEGMENTS)},
    ),
    _attention_case(
        "segments_that_see_nothing",
        sizes=(2, 128, 192, 2, 1, 64),
        extra=lambda rng: {"segment_ids": (_ACCELERATOR_SEGMENTS[::-1, :128], _ACCELERATOR_SEGMENTS)},
    ),
    _attention_case("more_keys", sizes=(1, 64, 192, 2, 2, 128)),
    _attention_case("even_lengths", sizes=(1, 130, 130, 2, 2, 64), causal=True, scale=0.2),
    _attention_case("heads_of_80", sizes=(1, 128, 128, 2, 2, 80)),
    _attention_case(
        "kv_lengths", sizes=(3, 128, 192, 2, 1, 128), extra=lambda rng: {"kv_lengths": integers(0, 65, 192)}
    ),
    _attention_case(
        "causal_kv_lengths",
        sizes=(2, 128, 128, 2, 2, 64),
        causal=True,
        extra=lambda rng: {"kv_lengths": integers(1, 100)},
    ),
    _attention_case("softcap", sizes=(1, 192, 192, 2, 1, 128), causal=True, softcap=2.0),
    _attention_case(
        "sinks", sizes=(1, 192, 192, 2, 1, 64), causal=True, extra=lambda rng: {"sinks": rng.normal(size=2)}
    ),
    _attention_case(
        "sinks_and_empty_rows",
        sizes=(2, 64, 128, 2, 2, 64),
        extra=lambda rng: {"sinks": rng.normal(size=2), "kv_lengths": integers(0, 100)},
    ),
    _attention_case(
        "bias", sizes=(1, 128, 128, 2, 2, 64), extra=lambda rng: {"bias": rng.normal(size=(1, 2, 128, 128))}
    ),
    _attention_case(
        "mask_with_empty_rows",
        sizes=(1, 128, 192, 2, 1, 64),
        extra=lambda rng: {"mask": (rng.random((1, 1, 128, 192)) < 0.5) & (np.arange(128) % 7 > 0)[:, None]},
    ),
    _attention_case("later_queries", sizes=(1, 64, 192, 4, 2, 128), causal=True),
    _attention_case("heads_of_256", sizes=(1, 128, 128, 2, 1, 256), causal=True),
    _attention_case("odd_lengths", sizes=(1, 131, 67, 2, 1, 64), causal=True, query_offset=3),
    _attention_case("window_to_both_sides", sizes=(1, 192, 192, 2, 2, 64), window=(40, 20)),
    _attention_case("narrow_values", sizes=(1, 128, 128, 2, 2, 192), value_dim=128, causal=True),
    _attention_case("one_query", sizes=(2, 1, 192, 4, 2, 128), extra=lambda rng: {"kv_lengths": integers(0, 150)}),
)


def _oracle(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    **masking: Any,
) -> Any:
    """Computes the definition, one (row, head, query, key) at a time."""
    batch, q_seq, heads, key_dim = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (key_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    allowed = _allowed((batch, heads, q_seq, key.shape[1]), **masking)
    sink_weight = jnp.zeros(heads) if sinks is None else jnp.exp(sinks)
    weights = jnp.where(allowed, jnp.exp(scores), 0.0)
    denominator = jnp.sum(weights, axis=-1) + sink_weight[None, :, None]
    empty = denominator == 0
    safe = jnp.where(empty, 1.0, denominator)
    output = jnp.einsum("bhqk,bkhd->bqhd", weights / safe[..., None], value)
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe)).swapaxes(1, 2)
    return (output, lse) if return_lse else output


def _allowed(
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    query_offset: Any = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    segment_ids: Any = None,
    kv_lengths: Any = None,
) -> np.ndarray:
    """The definition, one (row, query, key) at a time."""
    batch, _, q_seq, kv_seq = shape
    left, right = window or (None, None)
    offsets = np.broadcast_to(kv_seq - q_seq if query_offset is None else query_offset, batch)
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    q_segments, kv_segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for row, i, j in np.ndindex(batch, q_seq, kv_seq):
        place = i + offsets[row]
        forbidden = (
            (causal and j > place)
            or (left is not None and j < place - left)
            or (right is not None and j > place + right)
            or (kv_lengths is not None and j >= kv_lengths[row])
            or (segment_ids is not None and q_segments[row, i] != kv_segments[row, j])
        )
        if forbidden:
            allowed[row, :, i, j] = False
    return allowed


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
