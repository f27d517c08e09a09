"""Softmax attention of ragged queries to keys and values in pages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import (
    Axes,
    check_floating,
    check_integer,
    check_known,
    check_positive,
    check_same_dtype,
    check_static,
    check_window,
)
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references.paged_places import bounded_places, padding_as_zero
from stack_core.ops.references.paged_pools import LAYOUTS, holds_values, parts
from stack_core.ops.references.quantized import QuantizedArray, is_quantized, logical_array, take
from stack_core.ops.references.running_softmax import (
    add_tile,
    by_group,
    empty_softmax,
    finish,
    masked_logits,
    with_sinks,
)

__all__ = ["OP", "REFERENCE", "checked_call", "paged_attention"]

_SYMBOLIC_BLOCK_ROWS = 16
_STEP_SLOTS = 128


def paged_attention(
    query: Float[Array, "tokens heads head_dim"],
    key_pages: Float[Array, "... head_dim"] | QuantizedArray,
    value_pages: Float[Array, "_ _ _ value_dim"] | QuantizedArray | None,
    *,
    block_tables: Int[Array, "batch pages_per_seq"],
    kv_lengths: Int[Array, " batch"],
    query_starts: Int[Array, " batch_and_one"],
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    ahead: Int[Array, " tokens"] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    layout: str = "phsd",
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "tokens heads out_dim"]:
    """Computes causal attention of the last tokens of several sequences to their paged keys and values.

        o_t = sum_j exp(z_tj) v_j / d_t        d_t = sum_j exp(z_tj) + exp(s)
        z_tj = c tanh(scale q_t k_j / c)       for j <= p_t + a_t within the window

    Symbols are as in `attention`. Queries of all sequences are concatenated: tokens `query_starts[b]` to
    `query_starts[b + 1]` are the last tokens of sequence b. Query i of sequence b is at key position
    p = `kv_lengths[b]` - (its number of queries) + i. Key j of the sequence is in slot j % slots of page
    `block_tables[b, j // slots]`. A call may mix full prompts, chunks of prompts and single tokens.

    Unused slots of pages and unused entries of `block_tables` are ignored: they may contain NaN and invalid page
    numbers. Tokens before `query_starts[0]` and from `query_starts[-1]` on are padding with output 0. The output of a
    query without visible keys is 0 as well. A sequence without queries costs nothing for any length.

    Indices are clamped to their range: page numbers to the pages of the pool, lengths to the slots of the sequence's
    row of the table, and starts to [previous start, `tokens`].

    The products run in the dtype of the query with an fp32 accumulator, the softmax in fp32. Gradients go to `query`,
    `sinks` and the pages (to the scales of quantized pages).

    Args:
      query: q, [tokens, heads, head_dim].
      key_pages: k, with the axes of `layout`, of the dtype of `query` or quantized; heads is a multiple of kv_heads,
        consecutive heads share a key head.
      value_pages: v, like `key_pages`; its head_dim may differ and is the width of the result. None if `key_pages`
        includes the values: as separate vectors in the layout "psh2d", or as the first `value_dim` features of the
        keys in other layouts (the cached latents of latent attention).
      block_tables: [batch, pages_per_seq], page numbers of each sequence in order.
      kv_lengths: [batch], number of keys of each sequence, including the keys of its queries.
      query_starts: [batch + 1], ascending, from 0 unless the first tokens are padding.
      window: (left, right), inclusive distances in keys; None means unlimited. Keys after a query are masked,
        except for the next a of them.
      softcap: c, positive.
      sinks: s, [heads], logits added to the denominator only.
      ahead: a, [tokens], non-negative number of keys of the sequence after each query that it attends to as well, such
        as the rest of an image; None means 0.
      scale: factor on the products; by default head_dim ** -0.5.
      value_dim: width of the values, from 1 to head_dim; required if the values are part of the keys, else None.
      layout: "phsd" [pages, kv_heads, slots, head_dim], the fastest for the reference on CPUs; "pshd" [pages, slots,
        kv_heads, head_dim]; "hpsd" [kv_heads, pages, slots, head_dim]; or "psh2d" [pages, slots, kv_heads, 2,
        head_dim], a single pool with each key followed by its value, without `value_pages`.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      o, [tokens, heads, value_dim or head_dim of `value_pages`], of the dtype of `query`.

    Raises:
      ShapeError: mismatched sizes; the message names the argument and the axis.
      ArgumentError: wrong dtypes, a negative window, a non-positive softcap, or a `value_dim` that is missing or
        superfluous.
      UnknownName: unknown layout.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023
    (arXiv:2309.06180); Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867);
    values as part of the keys as in DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1.2.
    """
    arrays, options = checked_call(
        query,
        key_pages,
        value_pages,
        block_tables=block_tables,
        kv_lengths=kv_lengths,
        query_starts=query_starts,
        window=window,
        softcap=softcap,
        sinks=sinks,
        ahead=ahead,
        scale=scale,
        value_dim=value_dim,
        layout=layout,
    )
    return dispatch(OP, arrays, options, implementation, axes)


def checked_call(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    block_tables: Any,
    kv_lengths: Any,
    query_starts: Any,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: Any,
    scale: float | None,
    value_dim: int | None,
    layout: str,
    ahead: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks the arguments and returns the arrays and options of a call; raises as `paged_attention`."""
    check_known("paged_attention", "layout", layout, tuple(LAYOUTS))
    check_static("paged_attention", value_dim=value_dim)
    if holds_values(layout):
        _check_one_pool(value_pages, value_dim, layout)
    _check_operands(query, key_pages, value_pages, sinks, ahead, layout)
    _check_places(query, block_tables=block_tables, kv_lengths=kv_lengths, query_starts=query_starts)
    check_window("paged_attention", window)
    check_positive("paged_attention", softcap=softcap, scale=scale)
    if not holds_values(layout):
        _check_value_dim(query, value_pages, value_dim)
    arrays = {
        "query": query,
        "key_pages": key_pages,
        "value_pages": value_pages,
        "block_tables": block_tables,
        "kv_lengths": kv_lengths,
        "query_starts": query_starts,
        "sinks": sinks,
    }
    if ahead is not None:  # implementations may not know it
        arrays["ahead"] = ahead
    options = {
        "window": window,
        "softcap": softcap,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "value_dim": value_dim,
        "layout": layout,
    }
    return arrays, options


def _check_operands(query: Any, key_pages: Any, value_pages: Any, sinks: Any, ahead: Any, layout: str) -> None:
    sizes = Axes("paged_attention")
    sizes.match("query", query, "tokens heads head_dim")
    sizes.match("key_pages", logical_array(key_pages), LAYOUTS[layout])
    if value_pages is not None:
        sizes.match("value_pages", logical_array(value_pages), LAYOUTS[layout].replace("head_dim", "value_dim"))
    sizes.match("sinks", sinks, "heads")
    if ahead is not None:
        sizes.match("ahead", ahead, "tokens")
        check_integer("paged_attention", ahead=ahead)
    if sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(
            f"paged_attention: query has {sizes['heads']} heads and key_pages has {sizes['kv_heads']} kv_heads; "
            "expected a multiple, so that each key head serves equally many query heads."
        )
    check_floating("paged_attention", query=query, sinks=sinks)
    pages = {"key_pages": key_pages, "value_pages": value_pages}
    plain = {name: array for name, array in pages.items() if not is_quantized(array)}
    check_same_dtype("paged_attention", query=query, **plain)


def _check_one_pool(value_pages: Any, value_dim: int | None, layout: str) -> None:
    arguments = {"value_pages": value_pages, "value_dim": value_dim}
    if extra := [name for name, value in arguments.items() if value is not None]:
        raise ArgumentError(
            f"paged_attention: {' and '.join(extra)} is given, but in the layout {layout!r} key_pages holds the values "
            "too; leave it out."
        )


def _check_value_dim(query: Any, value_pages: Any, value_dim: int | None) -> None:
    head_dim = query.shape[-1]
    if value_pages is None and (value_dim is None or not 0 < value_dim <= head_dim):
        raise ArgumentError(
            f"paged_attention: value_dim is {value_dim} and there are no value_pages; expected how many of the "
            f"head_dim={head_dim} numbers of a key are its value."
        )
    if value_pages is not None and value_dim is not None:
        raise ArgumentError(
            f"paged_attention: value_dim is {value_dim} beside value_pages, which have a width of their own; "
            "leave one of the two out."
        )


def _check_places(query: Any, **places: Any) -> None:
    sizes = Axes("paged_attention")
    sizes.match("block_tables", places["block_tables"], "batch pages_per_seq")
    sizes.match("kv_lengths", places["kv_lengths"], "batch")
    check_integer("paged_attention", **places)
    expected = (sizes["batch"] + 1,)
    if tuple(places["query_starts"].shape) != expected:
        raise ShapeError(
            f"paged_attention: query_starts has shape {tuple(places['query_starts'].shape)}; expected {expected}, the "
            f"first query of each of the {sizes['batch']} sequences in kv_lengths and the end of the last."
        )


def _reference(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    block_tables: Any,
    kv_lengths: Any,
    query_starts: Any,
    sinks: Any,
    ahead: Any = None,
    window: Any,
    value_dim: int | None,
    layout: str,
    requested: Any,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Attends in blocks of queries: all blocks in parallel, page by page up to the last key of the longest sequence."""
    tokens, heads, head_dim = query.shape
    batch = block_tables.shape[0]
    pool = logical_array(key_pages)
    out_dim = value_dim or (pool if holds_values(layout) else logical_array(value_pages)).shape[-1]
    # Clamping needs at least one page, and a maximum over no key is undefined.
    if query.size == 0 or block_tables.size == 0 or pool.size == 0:
        return jnp.zeros_like(query, shape=(tokens, heads, out_dim)), {}
    pages, kv_heads, slots = (pool.shape[layout.index(axis)] for axis in "phs")
    block_tables, kv_lengths, query_starts = bounded_places(
        block_tables, kv_lengths, query_starts, pages=pages, slots=slots, tokens=tokens
    )
    # Sequences have different numbers of queries, so queries are gathered into blocks of equal size, padded per
    # sequence.
    rows = _block_rows(tokens // batch, heads // kv_heads)
    query_lengths = jnp.diff(query_starts)
    # [batch + 1], the first block of each sequence.
    block_starts = jnp.pad(jnp.cumsum(-(-query_lengths // rows)), (1, 0))

    # An upper bound on the number of blocks: each sequence adds at most rows - 1 padding rows.
    blocks = jnp.arange((tokens + batch * (rows - 1)) // rows)
    sequence = _last_start(block_starts, blocks)
    # [blocks, rows], index of each row within its sequence; rows beyond its queries are padding.
    row = ((blocks - block_starts[sequence]) * rows)[:, None] + jnp.arange(rows)
    real = row < query_lengths[sequence][:, None]
    # Padding rows read query 0, whose result is dropped when tokens are gathered back.
    token_of_row = jnp.where(real, query_starts[sequence][:, None] + row, 0)
    # The queries of a sequence are its last tokens; -1 hides every key from a padding row.
    positions = jnp.where(real, (kv_lengths - query_lengths)[sequence][:, None] + row, -1)
    operands = {
        # [blocks, kv_heads, group, rows, head_dim]
        "query": query[token_of_row].reshape(-1, rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4),
        "positions": positions,
        "seen": _last_seen(positions, ahead, token_of_row, kv_lengths[sequence]),
        "tables": block_tables[sequence],
        "key_pages": key_pages,
        "value_pages": value_pages,
    }
    left = None if window is None else window[0]
    attend_in = functools.partial(_attend_in, left=left, out_dim=out_dim, layout=layout, **options)
    # While JAX differentiates, only the loop with a static length can be traced.
    output, lse = attend_in(_visit_or_skip, **operands) if is_plain() else _attend(attend_in, operands)
    if sinks is not None:
        output, _ = with_sinks(output, lse, sinks)
    output = output.transpose(0, 3, 1, 2, 4).reshape(-1, heads, out_dim).astype(query.dtype)

    token = jnp.arange(tokens)
    sequence = _last_start(query_starts, token)
    # Back to token order: token t of sequence s is row (t - start of s) of the blocks of s.
    place = block_starts[sequence] * rows + token - query_starts[sequence]
    return padding_as_zero(jnp.take(output, place, axis=0, mode="clip"), query_starts), {}


def _last_seen(positions: Any, ahead: Any, tokens: Any, kv_lengths: Any) -> Any:
    """Returns the position of the last key that each row sees, or None if it is the row's own."""
    if ahead is None:
        return None
    last = jnp.minimum(positions + jnp.maximum(ahead[tokens], 0), kv_lengths[:, None] - 1)
    return jnp.where(positions < 0, -1, last)


def _block_rows(queries: Size, group: int) -> int:
    """Returns the number of queries in a block: about the queries per sequence, so about half a block is padding.

    A block has at least two rows for each key head, since a bf16 product with one row is slower than with two on CPUs.
    """
    if is_symbolic(queries):
        return max(_SYMBOLIC_BLOCK_ROWS, 2 // group)
    return max(1 << (max(queries, 1).bit_length() - 1), 2 // group)


def _last_start(starts: Any, places: Any) -> Any:
    """Returns the index of the last range that starts at or before each position."""
    after = jnp.sum(starts[1:] <= places[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(after, starts.shape[0] - 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(attend_in: Callable[..., Any], operands: Any) -> Any:
    """Attends to the needed pages only, in a loop with a dynamic trip count.

    JAX cannot reverse-differentiate such a loop. The gradient loops over all table entries and skips unneeded pages.
    """
    return attend_in(_visit_needed, **operands)


def _attend_forward(attend_in: Callable[..., Any], operands: Any) -> Any:
    return _attend(attend_in, operands), operands


def _attend_backward(attend_in: Callable[..., Any], operands: Any, cotangent: Any) -> Any:
    _, vjp = jax.vjp(lambda operands: attend_in(_visit_or_skip, **operands), operands)
    return vjp(cotangent)


_attend.defvjp(_attend_forward, _attend_backward)


def _visit_needed(visit: Callable[..., Any], first: Any, stop: Any, steps: int, state: Any) -> Any:
    return lax.fori_loop(first, stop, visit, state)


def _visit_or_skip(visit: Callable[..., Any], first: Any, stop: Any, steps: int, state: Any) -> Any:
    @jax.checkpoint
    def visit_or_skip(state: Any, step: Any) -> Any:
        needed = (first <= step) & (step < stop)
        return lax.cond(needed, lambda state: visit(step, state), lambda state: state, state), None

    return lax.scan(visit_or_skip, state, jnp.arange(steps, dtype=jnp.asarray(first).dtype))[0]


def _attend_in(
    loop: Callable[..., Any],
    *,
    query: Any,
    positions: Any,
    seen: Any,
    tables: Any,
    key_pages: Any,
    value_pages: Any,
    left: int | None,
    out_dim: int,
    layout: str,
    **options: Any,
) -> tuple[Any, Any]:
    """Computes attention of query blocks [blocks, kv_heads, group, rows, head_dim], several pages per step.

    Returns:
      The output [blocks, kv_heads, group, rows, out_dim] in fp32, and the log of the softmax's denominator.
    """
    slots = logical_array(key_pages).shape[layout.index("s")]
    step_pages = min(max(_STEP_SLOTS // slots, 1), tables.shape[1])
    steps, step_keys = -(-tables.shape[1] // step_pages), step_pages * slots
    # [blocks, steps, step_pages]; the padding of the tables is page 0, whose keys the positions hide.
    tables = jnp.pad(tables, ((0, 0), (0, steps * step_pages - tables.shape[1]))).reshape(-1, steps, step_pages)
    # [blocks], the last key that a row of the block sees.
    last = jnp.max(positions if seen is None else seen, axis=1)

    def visit(step: Any, state: Any) -> Any:
        first_key = step * step_keys
        exists = (first_key + jnp.arange(step_keys) <= last[:, None])[:, None, :, None]

        def read(pages: Any) -> list[Any]:
            # Unwritten slots may contain NaN, and 0 * NaN is NaN, so hidden values are set to 0 as well.
            return [jnp.where(exists, slots, 0) for slots in _slots(pages, tables[:, step], layout, query.dtype)]

        key, *values = read(key_pages) if value_pages is None else [*read(key_pages), *read(value_pages)]
        value = values[0] if values else key[..., :out_dim]
        products = by_group("bhqd,bhkd->bhqk", query, key)
        places: dict[str, Any] = {"query_positions": positions, "first_key": first_key, "window": (left, 0)}
        if seen is not None:
            visible = first_key + jnp.arange(step_keys) <= seen[:, :, None]
            places |= {"window": (left, None), "mask": visible[:, None, None]}
        return add_tile(state, masked_logits(products, **places, **options), value)

    # The first key in the window of any real row; padding rows must not lower it.
    first = 0 if left is None else jnp.min(jnp.where(positions < 0, steps * step_keys, positions)) - left
    state = vary_alike(empty_softmax(query, out_dim), positions, tables, key_pages, value_pages)[0]
    return finish(loop(visit, jnp.maximum(first, 0) // step_keys, jnp.max(last) // step_keys + 1, steps, state))


def _slots(pages: Any, numbers: Any, layout: str, dtype: Any) -> list[Any]:
    """Gathers the slots of the pages with these numbers, [blocks, n] -> [blocks, kv_heads, n * slots, head_dim].

    Returns keys and values for a pool with both, otherwise a single array.
    """
    taken, axes = take(pages, numbers, layout.index("p"), dtype), layout.replace("p", "bn")
    ordered = [jnp.einsum(f"{axes.replace('2', '')}->bhnsd", part) for part in parts(taken, axes)]
    return [part.reshape(*part.shape[:2], -1, part.shape[-1]) for part in ordered]


def _axes(call: OpCall) -> OpAxes:
    keys = LAYOUTS[call.options["layout"]]
    operands = {
        "query": "tokens heads head_dim",
        "key_pages": keys,
        "value_pages": keys.replace("head_dim", "value_dim"),
        "block_tables": "batch pages_per_seq",
        "kv_lengths": "batch",
        "query_starts": "batch_and_one",
        "sinks": "heads",
        "ahead": "tokens",
    }
    whole = {"tokens", "head_dim", "value_dim", "pages", "slots", "2", "batch", "pages_per_seq", "batch_and_one"}
    return OpAxes(operands, ("tokens heads value_dim",), whole=frozenset(whole), together=(("heads", "kv_heads"),))


OP = Op("paged_attention", _reference, _axes, keeps=True)
REFERENCE = OP.implementation()
