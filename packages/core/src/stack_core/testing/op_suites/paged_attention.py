"""The contract suite of `paged_attention`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, integers, spoiled

__all__ = ["SUITE"]

_ABSENT_PAGES = (-7, 10**6)
_AXES = {"p": 0, "h": 1, "s": 2, "d": 3}
_BOTH = "psh2d"
"""Layout of a single pool with keys and values."""


def _paged_case(
    name: str,
    *sequences: tuple[int, int],
    sizes: tuple[int, int, int, int] = (4, 2, 4, 8),
    padding_tokens: int = 0,
    layout: str = "phsd",
    value_width: int | None = None,
    extra: Callable[[np.random.Generator], Mapping[str, Any]] = lambda rng: {},
    **options: Any,
) -> OpCase:
    """Builds a case.

    Slots without a key contain NaN, and unused entries of the block tables are not page numbers.

    Args:
      sequences: (number of queries, number of keys) of each sequence.
      sizes: (heads, kv_heads, slots, head_dim).
      value_width: width of the value pages; None means head_dim. With the option `value_dim`, or with a single pool for
        keys and values, there are no value pages.
    """
    heads, kv_heads, slots, head_dim = sizes
    queries, lengths = zip(*sequences, strict=True)
    used = [-(-length // slots) for length in lengths]
    pages = sum(used) + 2

    def pool(rng: np.random.Generator, tables: np.ndarray, width: int) -> np.ndarray:
        drawn = rng.normal(size=(pages, kv_heads, slots, width))
        holds_a_key = np.zeros((pages, slots), bool)
        for row, length in zip(tables, lengths, strict=True):
            for key in range(length):
                holds_a_key[row[key // slots], key % slots] = True
        masked = np.where(holds_a_key[:, None, :, None], drawn, np.nan)
        return masked.transpose([_AXES[axis] for axis in layout if axis != "2"])

    def pools(rng: np.random.Generator, tables: np.ndarray) -> Mapping[str, np.ndarray | None]:
        key = pool(rng, tables, head_dim)
        value = None if "value_dim" in options else pool(rng, tables, value_width or head_dim)
        if layout == _BOTH:
            key, value = np.stack([key, value], axis=-2), None  # type: ignore[list-item]
        return {"key_pages": key, "value_pages": value}

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        numbers = iter(rng.permutation(pages))
        tables = rng.choice(_ABSENT_PAGES, size=(len(sequences), max(used) + 2))
        for row, count in zip(tables, used, strict=True):
            row[:count] = [next(numbers) for _ in range(count)]
        return {
            "query": rng.normal(size=(sum(queries) + padding_tokens, heads, head_dim)),
            **pools(rng, tables),
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


def _bad_indices_case(name: str, tokens: int = 5, layout: str = "pshd", **indices: Any) -> OpCase:
    """Builds a case with indices out of range: three sequences with two of 5 pages each, of 4 slots."""
    valid = {"block_tables": [[1, 3], [0, 4], [2, 1]], "kv_lengths": [5, 8, 3], "query_starts": [0, 1, 3, 4]}

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        query, *pools = (rng.normal(size=size) for size in ((tokens, 4, 8), *[(5, 4, 2, 8)] * 2))
        key_pages, value_pages = (np.stack(pools, axis=-2), None) if layout == _BOTH else pools
        drawn = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
        return drawn | {index: np.array(values, np.int32) for index, values in {**valid, **indices}.items()}

    return OpCase("paged_attention", name, arrays, {"layout": layout})


def _sinks(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"sinks": rng.normal(size=4)}


def _absent_sinks(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"sinks": np.array([0.5, -np.inf, 1.0, -np.inf])}


def _ahead(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"ahead": integers(3, 2, 1, 0, 2, 1, 0, 1, 0, 9, 5, 4)}


_MIXED = ((1, 9), (6, 6), (3, 8), (1, 1))

_CASES = (
    _paged_case("decode", (1, 9), (1, 1), (1, 4)),
    _paged_case("mixed", *_MIXED, padding_tokens=3),
    _paged_case("slot_major", *_MIXED, layout="pshd"),
    _paged_case("head_first", *_MIXED, layout="hpsd"),
    _paged_case("slot_major_decode", (1, 9), (0, 5), (1, 1), (1, 4), padding_tokens=1, layout="pshd"),
    _paged_case("keys_beside_values", *_MIXED, padding_tokens=3, layout=_BOTH),
    _paged_case("keys_beside_values_decode", (1, 9), (0, 5), (1, 1), (1, 4), padding_tokens=1, layout=_BOTH),
    _paged_case("keys_beside_values_options", *_MIXED, (0, 2), layout=_BOTH, window=(4, 0), softcap=2.0, scale=0.5),
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
    _paged_case("ahead", *_MIXED, padding_tokens=1, extra=_ahead),
    _paged_case("ahead_in_a_window", *_MIXED, padding_tokens=1, layout="pshd", window=(2, 0), extra=_ahead),
    _paged_case("sinks_and_empty_rows", (2, 0), (3, 4), padding_tokens=1, extra=_sinks),
    _paged_case("narrow_values", *_MIXED, padding_tokens=3, value_width=5, layout="pshd"),
    _paged_case("wide_values", (1, 9), (1, 4), sizes=(4, 2, 4, 8), value_width=12),
    _paged_case("values_in_keys", *_MIXED, padding_tokens=3, sizes=(4, 1, 4, 8), value_dim=6),
    _paged_case("values_in_keys_and_sinks", *_MIXED, extra=_sinks, window=(4, 0), softcap=2.0, value_dim=5),
    _paged_case("values_that_are_keys_of_no_queries", (0, 3), padding_tokens=2, value_dim=3),
    _quantized_case("quantized_by_slot", (6, 2, 4, 1), zeros=False),
    _quantized_case("quantized_by_tile", (3, 1, 2, 4), zeros=True),
    _bad_indices_case("pages_that_are_not_there", block_tables=[[-1, 5], [2**31 - 1, -(2**31)], [10**6, 2]]),
    _bad_indices_case("lengths_beyond_the_table", kv_lengths=[9, 2**31 - 1, 10**6]),
    _bad_indices_case("negative_lengths", kv_lengths=[-1, -(2**31), 6]),
    _bad_indices_case("starts_beyond_the_tokens", query_starts=[0, 3, 2**31 - 1, 10**6]),
    _bad_indices_case("starts_that_do_not_ascend", query_starts=[2, -(2**31), 4, 3]),
    _bad_indices_case(
        "bad_indices_of_one_pool",
        layout=_BOTH,
        block_tables=[[-1, 5], [2**31 - 1, -(2**31)], [10**6, 2]],
        kv_lengths=[9, -1, 10**6],
        query_starts=[1, -(2**31), 4, 10**6],
    ),
    _bad_indices_case("many_queries_without_keys", tokens=400, kv_lengths=[0, 1, 6], query_starts=[0, 390, 395, 400]),
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
    spoiled(
        _bad_indices_case(""),
        "not_a_number",
        query=((3, 2), np.nan),
        key_pages=((1, 0, 1), np.nan),
        value_pages=((0, 0, 0, 5), np.nan),
    ),
    spoiled(_bad_indices_case(""), "infinity", query=((3, 2), np.inf), value_pages=((0, 0, 0, 5), np.inf)),
    spoiled(  # In one head, the scores of all keys of the first sequence are -inf.
        _bad_indices_case("", kv_lengths=[3, 8, 3]),
        "infinite_value_of_weight_zero",
        query=((..., 2), 1.0),
        key_pages=((1, slice(None), 0, 2), -np.inf),
        value_pages=((1, 1, 0, 5), np.inf),
    ),
    spoiled(
        _paged_case("", (1, 9), (1, 0), (1, 4), padding_tokens=1, layout="pshd", extra=_sinks),
        "sink_that_is_not_a_number",
        sinks=(1, np.nan),
    ),
    _paged_case("absent_sinks", (1, 9), (1, 0), (1, 4), padding_tokens=1, layout="pshd", extra=_absent_sinks),
)

_DECODED, _PROMPTS = ((1, 100), (1, 1), (1, 64), (1, 33)), ((1, 100), (40, 40), (33, 70), (1, 1))


def _in_pages(name: str, *sequences: tuple[int, int], layout: str = "phsd", **rest: Any) -> OpCase:
    options: dict[str, Any] = {"sizes": (4, 2, 16, 128), **rest}
    return _paged_case(f"{name}_{layout}", *sequences, layout=layout, **options)


_FOR_ACCELERATORS = in_tiles(
    *(
        case
        for layout in ("phsd", "pshd", _BOTH)
        for case in (
            _in_pages("decode", *_DECODED, layout=layout),
            _in_pages("decode_large_pages", *_DECODED, layout=layout, sizes=(8, 2, 64, 128)),
            _in_pages("decode_empty_sequences", (0, 0), (1, 40), (0, 7), (1, 0), padding_tokens=2, layout=layout),
            _in_pages("decode_window", *_DECODED, layout=layout, window=(30, 0)),
            _in_pages("decode_softcap", (1, 100), (1, 64), (1, 33), layout=layout, softcap=2.0),
            _in_pages("decode_a_head_a_key_head", *_DECODED, layout=layout, sizes=(2, 2, 32, 128)),
            _in_pages("prompts", *_PROMPTS, padding_tokens=3, layout=layout),
            _in_pages("prompts_window", *_PROMPTS, layout=layout, window=(30, 0), softcap=2.0),
        )
    ),
    *(
        case
        for layout in ("phsd", "pshd")
        for case in (
            _in_pages("decode_sinks", *_DECODED, layout=layout, extra=_sinks),
            _in_pages("decode_heads_of_64", *_DECODED, layout=layout, sizes=(4, 1, 16, 64)),
            _in_pages("decode_heads_of_256", *_DECODED, layout=layout, sizes=(4, 2, 16, 256)),
        )
    ),
    _in_pages("decode_values_in_keys", *_DECODED, sizes=(4, 1, 16, 192), value_dim=128),
)


def _oracle(  # noqa: PLR0913  the arguments of the op
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    block_tables: Any,
    kv_lengths: Any,
    query_starts: Any,
    layout: str,
    value_dim: int | None = None,
    ahead: Any = None,
    **scoring: Any,
) -> Any:
    """Computes the definition, each token with its own keys, after clipping indices into their range."""
    if layout == _BOTH:
        key_pages, value_pages = (dense(key_pages)[..., half, :] for half in (0, 1))
        layout = layout.replace("2", "")
    order = [layout.index(axis) for axis in _AXES]
    key_pages = dense(key_pages).transpose(order)
    value_pages = key_pages[..., :value_dim] if value_pages is None else dense(value_pages).transpose(order)
    pages, _, slots, _ = key_pages.shape
    block_tables = np.clip(np.asarray(block_tables), 0, pages - 1)
    kv_lengths = np.clip(np.asarray(kv_lengths), 0, block_tables.shape[1] * slots)
    query_starts = np.maximum.accumulate(np.clip(np.asarray(query_starts), 0, len(query)))
    places = np.zeros((len(query), max(kv_lengths, default=0)), np.int32)
    # Distances to earlier keys; less than the negative number of keys ahead for keys that do not exist.
    ahead = np.zeros(len(query), int) if ahead is None else np.asarray(ahead)
    distances = np.full(places.shape, -1 - max(ahead, default=0))
    belongs = np.zeros((len(query), 1, 1), bool)
    for row, length in enumerate(kv_lengths):
        start, stop = query_starts[row : row + 2]
        keys = np.arange(length)
        belongs[start:stop] = True
        places[start:stop, :length] = block_tables[row, keys // slots] * slots + keys % slots
        distances[start:stop, :length] = np.arange(length - (stop - start), length)[:, None] - keys
    key, value = (pool.swapaxes(1, 2).reshape(pages * slots, *pool.shape[1::2]) for pool in (key_pages, value_pages))
    return jnp.where(belongs, _attended(query, key[places], value[places], distances, ahead, **scoring), 0.0)


def _attended(  # noqa: PLR0913  the arguments of the op
    query: Any,
    key: Any,
    value: Any,
    distances: np.ndarray,
    ahead: np.ndarray,
    *,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
) -> Any:
    """Computes attention of queries [tokens, heads, head_dim] over keys [tokens, keys, kv_heads, head_dim]."""
    seen = (distances >= -ahead[:, None]) & (window is None or window[0] is None or distances <= window[0])
    key, value = (jnp.where(seen[..., None, None], x, 0.0) for x in (key, value))
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("thd,tkhd->thk", query, key) * (query.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jnp.where(seen[:, None], jnp.exp(scores), 0.0)
    denominator = jnp.sum(weights, axis=-1) + (0.0 if sinks is None else jnp.exp(sinks))
    safe = jnp.where(denominator == 0, 1.0, denominator)
    return jnp.einsum("thk,tkhd->thd", weights / safe[..., None], value)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
