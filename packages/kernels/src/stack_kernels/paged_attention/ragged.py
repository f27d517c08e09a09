"""`paged_attention` on TPUs, for decoding and prompts: the ragged paged attention of the jax wheel.

The kernel reads one pool with alternating heads of keys and values, supports only a head_dim of 128, waits for pages of
sequences without keys that it never fetched, leaves tokens of no sequence unwritten, and averages invisible values for
a query without visible ones. This adapter gives such sequences a key, and zeroes such tokens and queries.

Unlike in the reference, a NaN in a key or a value reaches every query of its sequence, even queries to which it is
invisible.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import bounded_places, forward_only
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import first_problem, is_beyond, takes_no, unquantized

__all__ = ["RAGGED", "RaggedTiles"]

_DTYPES = ("bfloat16", "float32")
_HEAD_DIM = 128
_TABLE_BYTES = 2**18  # of scalar memory
_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB per kernel on the smallest chip
_MAX_KEYS = 512


@dataclass(frozen=True)
class RaggedTiles:
    """Number of queries, and of pages of one sequence, that the kernel processes at a time."""

    queries: int
    pages: int


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if (plain := unquantized(call, chip)) is not True:
        return plain
    if call.options["layout"] != "psh2d":
        return f"it reads pages of the layout 'psh2d', not {call.options['layout']!r}"
    if (refusal := takes_no(call, "sinks", "ahead")) is not True:
        return refusal
    query, keys, tables = (call.arrays[name] for name in ("query", "key_pages", "block_tables"))
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
        f"it is for a head_dim of {_HEAD_DIM}, not {query.shape[2]}": query.shape[2] != _HEAD_DIM,
        f"its tiles hold no {keys.shape[2]} heads of keys": not _fills_tiles(2 * keys.shape[2], query.dtype.itemsize),
        "it would take four of more heads of float32 at a time, and Mosaic takes eight or all": query.dtype.itemsize
        == 4
        and query.shape[1] == keys.shape[2] > 4,
        "a sequence has one key at most": tables.shape[1] * keys.shape[1] == 1,  # Mosaic cannot widen 1 row of bf16
        "the tables do not fit into scalar memory": 4 * tables.size > _TABLE_BYTES,
    }
    if not any(problems.values()):
        problems["a page and eight queries do not fit into VMEM"] = next(_space(call, chip), None) is None
        problems[f"{config} does not fit the call"] = is_beyond(config, _space(call, chip))
    return first_problem(problems)


def _fills_tiles(heads: int, itemsize: int) -> bool:
    """Checks whether the kernel can address these heads of keys and values, several of which share a 4-byte word."""
    words, rest = divmod(heads * itemsize, 4)
    return not rest and (words in (1, 2, 4, 8) or words % 8 == 0)


def _space(call: OpCall, chip: Chip) -> Iterator[RaggedTiles]:
    """Yields tiles that fit into VMEM; the largest with at most 32 queries and 512 keys come first."""
    keys, tokens = call.arrays["key_pages"], call.arrays["query"].shape[0]
    places = call.arrays["block_tables"].shape[1]
    if unquantized(call, chip) is not True or call.options["layout"] != "psh2d" or min(keys.shape) == 0:
        return
    for of_queries in (32, 64, 128, 16, 8):
        for of_keys in (_MAX_KEYS, 256, 128, 1):
            tiles = RaggedTiles(min(of_queries, tokens), min(max(of_keys // keys.shape[1], 1), places))
            if tiles.pages * keys.shape[1] > 1 and _vmem_bytes(call, tiles) <= _VMEM_BYTES:
                yield tiles


def _vmem_bytes(call: OpCall, tiles: RaggedTiles) -> int:
    """Bytes of two blocks of pages, queries and outputs, plus sums, statistics and scores in float32."""
    _, heads, head_dim = call.arrays["query"].shape
    _, slots, kv_heads, _, _ = call.arrays["key_pages"].shape
    itemsize = call.arrays["query"].dtype.itemsize
    keys, rows = tiles.pages * slots, tiles.queries * heads
    fetched = 2 * keys * kv_heads * 2 * head_dim * itemsize + 4 * rows * head_dim * itemsize
    scores = 4 * (rows // kv_heads) * keys * 4
    return fetched + 4 * rows * (head_dim + 2 * 128) + scores


def _attention(query: Any, key_pages: Any, *, config: RaggedTiles, **call: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    tokens = query.shape[0]
    pages, slots, kv_heads, _, head_dim = key_pages.shape
    places = (call[name] for name in ("block_tables", "kv_lengths", "query_starts"))
    tables, lengths, starts = bounded_places(*places, pages=pages, slots=slots, tokens=tokens)
    left = None if call["window"] is None else call["window"][0]
    attend = functools.partial(
        ragged_paged_attention,
        sm_scale=call["scale"],
        # The kernel counts the query's own key.
        sliding_window=None if left is None else left + 1,
        soft_cap=call["softcap"],
        num_kv_pages_per_block=config.pages,
        num_queries_per_block=config.queries,
    )
    with_keys = jnp.maximum(lengths, 1)
    pool = key_pages.reshape(pages, slots, 2 * kv_heads, head_dim)
    found = untyped(attend, query, pool, with_keys, tables, *_visited(starts))
    return jnp.where(_sees_a_key(lengths, starts, tokens)[:, None, None], found, 0)


def _visited(starts: Any) -> tuple[Any, Any]:
    """Returns the starts passed to the kernel, and how many sequences it visits, int32[1]: up to the last with a query.

    At least one sequence has a query; otherwise the kernel would not wait for the page that it fetches first.
    """
    places = jnp.arange(len(starts), dtype=jnp.int32)
    padded_starts = jnp.where(starts[-1] > starts[0], starts, jnp.minimum(places, 1))
    return padded_starts, jnp.max(jnp.where(jnp.diff(padded_starts) > 0, places[1:], 1), keepdims=True)


def _sees_a_key(lengths: Any, starts: Any, tokens: int) -> Any:
    """Checks whether a token is a query of a sequence and sees a key, bool[tokens]."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    after = jnp.searchsorted(starts[1:], token, side="right", method="compare_all")
    sequence = jnp.minimum(after, len(lengths) - 1)
    is_query = (token >= starts[0]) & (token < starts[-1])
    return is_query & (lengths[sequence] - starts[sequence + 1] + token >= 0)


RAGGED = OpImplementation(
    "paged_attention",
    "ragged",
    forward_only(_attention),
    platforms=("tpu",),
    supports=_supports,
    default=lambda call, chip: next(_space(call, chip), None),
    space=_space,
    is_opaque=True,
)
