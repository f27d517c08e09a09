"""The contract suite of `paged_attention`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing._cases import OpCase, OpSuite, Quantized, dense, integers

__all__ = ["SUITE"]

_ABSENT_PAGES = (-7, 10**6)
_AXES = {"p": 0, "h": 1, "s": 2, "d": 3}


def _paged_case(
    name: str,
    *sequences: tuple[int, int],
    sizes: tuple[int, int, int, int] = (4, 2, 4, 8),
    padding_tokens: int = 0,
    layout: str = "phsd",
    extra: Callable[[np.random.Generator], Mapping[str, Any]] = lambda rng: {},
    **options: Any,
) -> OpCase:
    """`sequences` are their numbers of queries and of keys; `sizes` are heads, kv_heads, slots, head_dim.

    Slots that no key has hold NaN, entries of the tables that no sequence needs are no page's numbers.
    """
    heads, kv_heads, slots, head_dim = sizes
    queries, lengths = zip(*sequences, strict=True)
    used = [-(-length // slots) for length in lengths]
    pages = sum(used) + 2

    def pool(rng: np.random.Generator, tables: np.ndarray) -> np.ndarray:
        drawn = rng.normal(size=(pages, kv_heads, slots, head_dim))
        holds_a_key = np.zeros((pages, slots), bool)
        for row, length in zip(tables, lengths, strict=True):
            for key in range(length):
                holds_a_key[row[key // slots], key % slots] = True
        masked = np.where(holds_a_key[:, None, :, None], drawn, np.nan)
        return masked.transpose([_AXES[axis] for axis in layout])

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        numbers = iter(rng.permutation(pages))
        tables = rng.choice(_ABSENT_PAGES, size=(len(sequences), max(used) + 2))
        for row, count in zip(tables, used, strict=True):
            row[:count] = [next(numbers) for _ in range(count)]
        return {
            "query": rng.normal(size=(sum(queries) + padding_tokens, heads, head_dim)),
            "key_pages": pool(rng, tables),
            "value_pages": pool(rng, tables),
            "block_tables": tables.astype(np.int32),
            "kv_lengths": integers(*lengths),
            "query_starts": integers(0, *np.cumsum(queries)),
            **extra(rng),
        }

    return OpCase("paged_attention", name, arrays, {"layout": layout, **options})


def _quantized_case(name: str, scales: tuple[int, int, int, int], zeros: bool) -> OpCase:
    def pool(rng: np.random.Generator) -> Quantized:
        values = rng.integers(-100, 101, size=(6, 2, 4, 8)).astype(np.int8)
        offsets = rng.integers(-4, 5, size=scales).astype(np.int8) if zeros else None
        return Quantized(values, rng.uniform(0.01, 0.02, size=scales).astype(np.float32), offsets)

    def extra(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"key_pages": pool(rng), "value_pages": pool(rng)}

    case = _paged_case(name, (1, 9), (2, 3), padding_tokens=1, extra=extra)
    return OpCase(case.op, case.name, case.arrays, case.options, fixed=("key_pages", "value_pages"))


def _sinks(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"sinks": rng.normal(size=4)}


_MIXED = ((1, 9), (6, 6), (3, 8), (1, 1))

_CASES = (
    _paged_case("decode", (1, 9), (1, 1), (1, 4)),
    _paged_case("mixed", *_MIXED, padding_tokens=3),
    _paged_case("slot_major", *_MIXED, layout="pshd"),
    _paged_case("head_first", *_MIXED, layout="hpsd"),
    _paged_case("slot_major_decode", (1, 9), (0, 5), (1, 1), (1, 4), padding_tokens=1, layout="pshd"),
    _paged_case("head_a_key_head", (1, 5), (1, 7), sizes=(3, 3, 2, 8)),
    _paged_case("odd_sizes", (37, 53), (1, 67), sizes=(6, 2, 7, 20)),
    _paged_case("one_slot", (2, 3), (1, 4), sizes=(4, 4, 1, 8)),
    _paged_case("large_pages", (2, 300), (1, 5), sizes=(2, 1, 64, 8)),
    _paged_case("empty_sequences", (0, 0), (2, 5), (0, 7), (1, 3), (0, 0), padding_tokens=2),
    _paged_case("fewer_keys_than_queries", (3, 0), (4, 2), (1, 5)),
    _paged_case("no_queries", (0, 3), (0, 0), padding_tokens=2),
    _paged_case("window", *_MIXED, window=(2, 1)),
    _paged_case("window_in_later_pages", (1, 261), (3, 290), sizes=(2, 1, 64, 8), window=(5, None)),
    _paged_case("softcap", *_MIXED, softcap=1.5),
    _paged_case("sinks_and_empty_rows", (2, 0), (3, 4), padding_tokens=1, extra=_sinks),
    _quantized_case("quantized_by_slot", (6, 2, 4, 1), zeros=False),
    _quantized_case("quantized_by_tile", (3, 1, 2, 4), zeros=True),
    _paged_case(
        "everything",
        *_MIXED,
        (0, 2),
        padding_tokens=2,
        layout="pshd",
        extra=_sinks,
        window=(4, 0),
        softcap=2.0,
        scale=0.5,
    ),
)


def _oracle(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    block_tables: Any,
    kv_lengths: Any,
    query_starts: Any,
    layout: str,
    **scoring: Any,
) -> Any:
    """The definition, one sequence at a time."""
    order = [layout.index(axis) for axis in _AXES]
    key_pages, value_pages = (dense(pages).transpose(order) for pages in (key_pages, value_pages))
    slots = key_pages.shape[2]
    outputs = []
    for row, length in enumerate(kv_lengths):
        keys = np.arange(length)
        key, value = (pages[block_tables[row, keys // slots], :, keys % slots] for pages in (key_pages, value_pages))
        outputs.append(_attended(query[query_starts[row] : query_starts[row + 1]], key, value, **scoring))
    return jnp.concatenate([*outputs, jnp.zeros_like(query[query_starts[-1] :])])


def _attended(
    query: Any, key: Any, value: Any, *, window: Any = None, softcap: Any = None, sinks: Any = None, scale: Any = None
) -> Any:
    """The last queries of a sequence, [queries, heads, head_dim], with all its keys, [keys, kv_heads, head_dim]."""
    queries, heads, head_dim = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distances = (len(key) - queries + np.arange(queries))[:, None] - np.arange(len(key))
    seen = (distances >= 0) & (window is None or window[0] is None or distances <= window[0])
    weights = jnp.where(seen, jnp.exp(scores), 0.0)
    denominator = jnp.sum(weights, axis=-1) + (0.0 if sinks is None else jnp.exp(sinks)[:, None])
    safe = jnp.where(denominator == 0, 1.0, denominator)
    return jnp.einsum("hqk,khd->qhd", weights / safe[..., None], value)


SUITE = OpSuite(_CASES, _oracle)
