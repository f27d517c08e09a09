"""`paged_attention` on TPUs for decoding: each query reads the pages of its own sequence in place.

The tables are in scalar memory before the kernel starts, which allows fetching a page during the attention to the
previous page. Steps after a sequence's last page name that page again, which fetches nothing.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import bounded_places, forward_only, padding_as_zero
from stack_kernels.lazy_pallas import pl, pltpu
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import first_problem, takes_no, unquantized

__all__ = ["MOSAIC_TPU", "mosaic_tpu"]

_DTYPES = ("bfloat16", "float32")
_SUBLANES = 16  # bf16 is laid out in tiles of 16 rows
_LANES = 128
_VMEM_BYTES = 2**23  # of VMEM; XLA allows 32 MiB per kernel on a v6e
_TABLE_BYTES = 2**18  # of scalar memory
# Not -inf: the difference of two maxima must not be NaN while a query has seen no key.
_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


def mosaic_tpu(*, interpret: Any = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True, or `pltpu.InterpretParams`, interprets the kernel on any device.
    """
    return OpImplementation(
        "paged_attention",
        "mosaic_tpu",
        forward_only(lambda **call: _attention(**call, interpret=interpret)),
        platforms=("tpu",),
        supports=_supports,
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    for answer in (unquantized(call, chip), takes_no(call, "ahead")):
        if answer is not True:
            return answer
    query, keys, tables = (call.arrays[name] for name in ("query", "key_pages", "block_tables"))
    if call.options["layout"] != "phsd":
        return f"it reads pages of the layout 'phsd', not {call.options['layout']!r}"
    values = call.arrays["value_pages"]
    tokens, sequences = query.shape[0], tables.shape[0]
    used_bytes = _vmem_bytes(query, keys, values, call.options["value_dim"])
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
        "a page has one slot": keys.shape[2] == 1,  # Mosaic does not sum bf16 over an axis of length one
        f"it is for decoding, and {tokens} queries are two or more for each of {sequences} sequences": tokens
        >= 2 * sequences,
        f"pages and sums of {used_bytes} bytes do not fit into VMEM": used_bytes > _VMEM_BYTES,
        "the tables do not fit into scalar memory": 4 * tokens * tables.shape[1] > _TABLE_BYTES,
    }
    return first_problem(problems)


def _vmem_bytes(query: Any, keys: Any, values: Any, value_dim: int | None) -> int:
    """Bytes of VMEM: double-buffered pages, queries and results, and the running sums."""
    kv_heads, head_dim, out_dim = keys.shape[1], keys.shape[3], value_dim or values.shape[3]
    rows = query.shape[1] // kv_heads
    pages = [(pool.shape[1:], pool.dtype) for pool in (keys, values) if pool is not None]
    of_token = [((kv_heads, rows, size), query.dtype) for size in (head_dim, out_dim)]
    sums = [((kv_heads, rows, size), jnp.dtype("float32")) for size in (_LANES, _LANES, out_dim)]
    buffers = [*pages, *of_token, *pages, *of_token, *sums]
    return sum(
        kind.itemsize * heads * _ceil(many, _SUBLANES) * _ceil(size, _LANES) for (heads, many, size), kind in buffers
    )


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _attention(query: Any, key_pages: Any, value_pages: Any, *, interpret: Any, **call: Any) -> Any:
    tokens, heads, head_dim = query.shape
    pages, kv_heads, slots, _ = key_pages.shape
    places = (call[name] for name in ("block_tables", "kv_lengths", "query_starts"))
    tables, kv_lengths, query_starts = bounded_places(*places, pages=pages, slots=slots, tokens=tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    after = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(after, tables.shape[0] - 1)
    # The last token of a sequence is at its last key; each earlier token sees one key less.
    ends = kv_lengths[sequence] - (query_starts[sequence + 1] - token) + 1
    is_padding = (token < query_starts[0]) | (token >= query_starts[-1])
    ends = jnp.where(is_padding, 0, jnp.maximum(ends, 0))
    left = None if call["window"] is None else call["window"][0]
    begins = jnp.zeros_like(ends) if left is None else jnp.maximum(ends - 1 - left, 0)

    group = heads // kv_heads
    rows = _ceil(group, _SUBLANES)
    by_key_head = query.reshape(tokens, kv_heads, group, head_dim)
    padded = jnp.pad(by_key_head, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    result = _over_pages(
        (tables[sequence].reshape(-1), begins, ends),
        padded,
        key_pages,
        value_pages,
        _by_lane(call["sinks"], kv_heads, group, rows),
        out_dim=call["value_dim"] or value_pages.shape[-1],
        interpret=interpret,
        step=_Step(tables.shape[1], call["scale"], call["softcap"], value_pages is not None, call["sinks"] is not None),
    )
    return padding_as_zero(result[:, :, :group].reshape(tokens, heads, -1), query_starts)


def _by_lane(sinks: Any, kv_heads: int, group: int, rows: int) -> Any:
    """Broadcasts sinks to float32[kv_heads, rows, lanes], with the same number in every lane."""
    if sinks is None:
        return None
    grouped = jnp.pad(sinks.astype(jnp.float32).reshape(kv_heads, group), ((0, 0), (0, rows - group)))
    return jnp.broadcast_to(grouped[..., None], (kv_heads, rows, _LANES))


def _over_pages(
    prefetched: tuple[Any, Any, Any],
    query: Any,
    key_pages: Any,
    value_pages: Any,
    sinks: Any,
    *,
    step: "_Step",
    out_dim: int,
    interpret: Any,
) -> Any:
    """Computes the output, [tokens, kv_heads, rows, out_dim].

    Args:
      prefetched: the page of each token at each table entry, [tokens * places], and the range of keys that a token may
        attend to, begins[tokens] and ends[tokens].
      query: [tokens, kv_heads, rows, head_dim].
      key_pages: pages of keys.
      value_pages: pages of values, or None if values are part of the keys.
      sinks: float32[kv_heads, rows, lanes], or None.
      step: static properties of a grid step.
      out_dim: size of a value.
      interpret: as for `mosaic_tpu`.
    """
    tokens, kv_heads, rows, head_dim = query.shape
    slots = key_pages.shape[2]

    def page(token: Any, place: Any, table: Any, begins: Any, ends: Any) -> tuple[Any, ...]:
        # Steps outside the visible pages name the nearest visible page: an unchanged index fetches nothing.
        first, last = begins[token] // slots, jnp.maximum(ends[token] - 1, 0) // slots
        return table[token * step.places + jnp.clip(place, first, last)], 0, 0, 0

    def of_token(token: Any, place: Any, *_: Any) -> tuple[Any, ...]:
        return token, 0, 0, 0

    operands, in_specs = [query], [pl.BlockSpec((None, kv_heads, rows, head_dim), of_token)]
    for pool in (key_pages, value_pages):
        if pool is not None:
            operands.append(pool)
            in_specs.append(pl.BlockSpec((None, *pool.shape[1:]), page))
    if sinks is not None:
        operands.append(sinks)
        in_specs.append(pl.BlockSpec(sinks.shape, lambda token, place, *_: (0, 0, 0)))
    # One number per row, in every lane: VMEM is laid out in rows of 128 lanes.
    statistics = pltpu.VMEM((kv_heads, rows, _LANES), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, of=step),
        out_shape=jax.ShapeDtypeStruct((tokens, kv_heads, rows, out_dim), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tokens, step.places),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, kv_heads, rows, out_dim), of_token),
            scratch_shapes=[statistics, statistics, pltpu.VMEM((kv_heads, rows, out_dim), jnp.float32)],
        ),
        # The steps of a token share the scratch memory and run in order; tokens are independent.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="stack_paged_attention",
    )
    return untyped(call, *prefetched, *operands)


@dataclass(frozen=True)
class _Step:
    """Static properties of a step of the kernel's grid.

    Attributes:
      places: entries per row of the tables.
      scale: factor of the scores.
      softcap: softcap of the scores, or None.
      has_values: True if values have their own pages; otherwise they are the leading features of the keys.
      has_sinks: True if the softmax has sinks.
    """

    places: int
    scale: float
    softcap: float | None
    has_values: bool
    has_sinks: bool


def _kernel(table: Any, begins: Any, ends: Any, query: Any, keys: Any, *refs: Any, of: _Step) -> None:
    """Attends one token to one page; the token's last step divides by the sum of its weights."""
    del table
    *given, output, highest, total, weighted = refs
    values = given.pop(0) if of.has_values else None
    token, step = pl.program_id(0), pl.program_id(1)
    (kv_heads, slots, _), begin, end = keys.shape, begins[token], ends[token]

    @pl.when(step == 0)
    def _() -> None:
        highest[...] = jnp.full_like(highest, _LOWEST)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when((step >= begin // slots) & (step * slots < end))
    def _() -> None:
        def visible(shape: tuple[int, int], axis: int) -> Any:
            place = step * slots + lax.broadcasted_iota(jnp.int32, shape, axis)
            return (place >= begin) & (place < end)

        for head in range(kv_heads):
            scores = _dot(query[head], keys[head], 1) * of.scale
            if of.softcap is not None:
                scores = of.softcap * jnp.tanh(scores / of.softcap)
            seen = visible(scores.shape, 1)
            scores = jnp.where(seen, scores, _LOWEST)
            before = highest[head]
            now = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - now[:, :1]), 0)
            shrink = jnp.exp(before - now)
            value = keys[head, :, : weighted.shape[-1]] if values is None else values[head]
            value = jnp.where(visible(value.shape, 0), value, 0)  # unused slots may hold NaN
            highest[head] = now
            total[head] = total[head] * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            weighted[head] = weighted[head] * shrink[:, :1] + _dot(weights.astype(value.dtype), value, 0)

    @pl.when(step == of.places - 1)
    def _() -> None:
        denominator, factor = total[...], jnp.ones_like(total[...])
        if of.has_sinks:
            # A sink may exceed all scores, so the sums are rescaled to the common maximum.
            joined = jnp.maximum(highest[...], given[0][...])
            factor = jnp.exp(highest[...] - joined)
            denominator = denominator * factor + jnp.exp(given[0][...] - joined)
        share = jnp.where(denominator == 0, 0, factor / jnp.where(denominator == 0, 1, denominator))
        output[...] = (weighted[...] * share[..., :1]).astype(output.dtype)


def _dot(left: Any, right: Any, axis: int) -> Any:
    """Computes left[m, k] times right in fp32; `axis` is the k axis of right."""
    return lax.dot_general(left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


MOSAIC_TPU = mosaic_tpu()
