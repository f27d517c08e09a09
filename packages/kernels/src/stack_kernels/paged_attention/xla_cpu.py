"""`paged_attention` on CPUs for decoding: queries run in order, each over the pages of its own sequence only.

Each loop ends with its sequence, and short sequences do not wait for the longest. Pages are read in place. If query
heads share key heads, all heads have one product with the slots [slots, kv_heads * head_dim]. Each query is then
widened to all key heads and is zero outside its own head:

    z[(h, i), j] = sum_(h', d) q[i, h, d] [h = h'] k[j, h', d]

This takes kv_heads times the work of one product per head, but needs no transposed copy. To the running softmax it is a
single key head with that width as its head_dim and all heads as its group. If each head has its own key head, it has
its own loop: XLA reads the pages inside the product of one row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import (
    add_tile,
    bounded_places,
    contract,
    empty_softmax,
    finish,
    forward_only,
    logical_array,
    masked_logits,
    padding_as_zero,
    vary_alike,
    with_sinks,
)
from stack_kernels.attention.products import by_group, unmixed
from stack_kernels.supports import takes_no, unquantized

__all__ = ["XLA_CPU", "StepConfig", "values_like_keys"]

_WIDEST = 256
_MIN_HEAD_DIM = 128


@dataclass(frozen=True)
class StepConfig:
    """Size of a step of the loop over the pages.

    Attributes:
      slots: maximum number of slots per step, in full pages; a larger page is one step.
      pages: maximum number of pages per step, each of which is copied separately.
    """

    slots: int = 128
    pages: int = 8


def values_like_keys(call: OpCall) -> bool | str:
    """Returns True if values have their own pages, as wide as the keys' pages; otherwise the reason why not."""
    keys, values = call.arrays["key_pages"], call.arrays["value_pages"]
    if values is None:
        return "it reads values from pages of their own, and not from the keys'"
    widths = [jax.eval_shape(logical_array, pages).shape[-1] for pages in (keys, values)]
    return widths[0] == widths[1] or f"it takes keys and values of one width, not of {widths[0]} and {widths[1]}"


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    alike = values_like_keys(call)
    if alike is not True:
        return alike
    tokens, sequences = call.arrays["query"].shape[0], call.arrays["block_tables"].shape[0]
    for answer in (unquantized(call, chip), takes_no(call, "ahead")):
        if answer is not True:
            return answer
    if tokens >= 2 * sequences:
        return f"it is for decoding, and {tokens} queries are two or more for each of {sequences} sequences"
    return _heads_fit(call)


def _heads_fit(call: OpCall) -> bool | str:
    layout, pages = call.options["layout"], call.arrays["key_pages"].shape
    _, heads, head_dim = call.arrays["query"].shape
    kv_heads = pages[layout.index("h")]
    if heads == kv_heads:
        narrow = head_dim < _MIN_HEAD_DIM and call.arrays["query"].dtype.itemsize > 2
        return f"heads of {head_dim} that are not shared are faster all at once" if narrow else True
    if layout != "pshd":
        return f"it reads all heads of a slot at once, which lie apart in the layout {layout!r}"
    width = kv_heads * head_dim
    return width <= _WIDEST or f"a product for all key heads would be {width} wide; it is fast up to {_WIDEST}"


def _cpu(
    query: Any, key_pages: Any, value_pages: Any, *, sinks: Any, window: Any, config: StepConfig, **call: Any
) -> Any:
    tokens, heads, head_dim = query.shape
    layout = call["layout"]
    pages, slots, kv_heads = (key_pages.shape[layout.index(axis)] for axis in "psh")
    places = (call[name] for name in ("block_tables", "kv_lengths", "query_starts"))
    tables, kv_lengths, query_starts = bounded_places(*places, pages=pages, slots=slots, tokens=tokens)
    step_pages = min(max(config.slots // slots, 1), config.pages, tables.shape[1])
    # To full steps; the added entries lie beyond every sequence, so their slots are masked.
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % step_pages)))
    together = 1 if heads == kv_heads else kv_heads
    options = {name: call[name] for name in ("scale", "softcap", "layout")}
    options |= {"window": (None if window is None else window[0], 0), "step_pages": step_pages}
    own = jnp.eye(together, dtype=bool)[:, None, :, None]

    def attend(place: Any) -> tuple[Any, Any]:
        query, table, position, first_head = place
        wide = jnp.where(own, query.reshape(together, -1, 1, head_dim), 0).reshape(1, 1, -1, 1, together * head_dim)
        places = {"table": table, "position": position, "first_head": first_head}
        output, lse = _attend(wide, key_pages, value_pages, **places, **options)
        of_heads = output.reshape(together, -1, together, head_dim)
        return jnp.sum(jnp.where(own, of_heads, 0), axis=2), lse

    parts = kv_heads // together
    sequence, position = (jnp.repeat(x, parts) for x in _places(jnp.arange(tokens), kv_lengths, query_starts))
    first_heads = jnp.tile(jnp.arange(parts, dtype=jnp.int32) * together, tokens)
    by_part = query.reshape(tokens * parts, -1, head_dim)
    output, lse = lax.map(attend, (by_part, tables[sequence], position, first_heads))
    if sinks is not None:
        grouped = (tokens, kv_heads, heads // kv_heads, 1)
        output, _ = with_sinks(output.reshape(*grouped, head_dim), lse.reshape(grouped), sinks)
        output = padding_as_zero(output, query_starts)
    return output.reshape(query.shape).astype(query.dtype)


def _places(tokens: Any, kv_lengths: Any, query_starts: Any) -> tuple[Any, Any]:
    """Returns the sequence of each token and its key position: -1 for padding."""
    ends = query_starts[1:]
    after = jnp.sum(tokens[:, None] >= ends, axis=1)
    sequence = jnp.minimum(after, ends.shape[0] - 1)
    is_padding = (tokens < query_starts[0]) | (tokens >= ends[-1])
    return sequence, jnp.where(is_padding, -1, (kv_lengths - ends)[sequence] + tokens)


def _attend(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    table: Any,
    position: Any,
    first_head: Any,
    step_pages: int,
    layout: str,
    **options: Any,
) -> tuple[Any, Any]:
    """Computes the output of one query [1, 1, heads, 1, width] in fp32, and the log of the softmax's denominator.

    Args:
      query: the widened query.
      key_pages: pages of keys.
      value_pages: pages of values.
      table: page numbers of its sequence; their count is a multiple of `step_pages`.
      position: its key position, the last that it sees; negative for padding.
      first_head: first key head that its width covers.
      step_pages: pages per step.
      layout: axes of the pages.
    """
    step_keys = step_pages * key_pages.shape[layout.index("s")]
    left = options["window"][0]

    def visit(step: Any, state: Any) -> Any:
        first_key = step * step_keys
        numbers = [table[step * step_pages + page] for page in range(step_pages)]
        key, value = (_slots(pages, numbers, first_head, query.shape[-1], layout) for pages in (key_pages, value_pages))
        exists = first_key + jnp.arange(step_keys) <= position
        products = _products(query, key, query.shape[-1] // key_pages.shape[-1])
        scores = masked_logits(products, query_positions=position[None, None], first_key=first_key, **options)
        # Unused slots may hold NaN, which the weight 0 would not remove.
        return add_tile(state, scores, jnp.where(exists[:, None], value, 0), by_group)

    first = 0 if left is None else jnp.maximum(position - left, 0) // step_keys
    state = vary_alike(empty_softmax(query, query.shape[-1]), query, table, position, key_pages, value_pages)[0]
    # Padding has position -1, which makes the loop empty.
    return finish(lax.fori_loop(first, position // step_keys + 1, visit, state))


def _products(query: Any, key: Any, together: int) -> Any:
    """Multiplies queries [1, 1, heads, 1, width], widened to several heads, with keys [1, 1, keys, width]."""
    mixed = by_group("bhqd,bhkd->bhqk", query, key)
    if together == 1:
        return mixed

    def apart() -> Any:
        own = jnp.sum(query.reshape(together, -1, together, key.shape[-1] // together), axis=2)  # other heads are 0
        keys = key.reshape(-1, *own.shape[::2])
        return contract("hgd,khd->hgk", own, keys, mixed.dtype).reshape(mixed.shape)

    return unmixed(mixed, apart)


def _slots(pages: Any, numbers: list[Any], first_head: Any, width: int, layout: str) -> Any:
    """Returns the slots of the pages with these numbers, [1, 1, n * slots, width].

    Pages are copied one at a time, because XLA's CPU backend copies slices faster than it gathers.
    """
    sizes = dict(zip(layout, pages.shape, strict=True))
    part = {**sizes, "p": 1, "h": width // sizes["d"]}
    starts = ({"p": number, "h": first_head} for number in numbers)
    taken = [lax.dynamic_slice(pages, [at.get(axis, 0) for axis in layout], list(part.values())) for at in starts]
    return jnp.concatenate([page.reshape(1, 1, sizes["s"], width) for page in taken], axis=2)


_CONFIGS = (StepConfig(), StepConfig(slots=64), StepConfig(slots=256), StepConfig(pages=16))

XLA_CPU = OpImplementation(
    op="paged_attention",
    name="xla_cpu",
    forward=forward_only(_cpu),
    platforms=("cpu",),
    supports=_supports,
    default=lambda call, chip: _CONFIGS[0],
    space=lambda call, chip: _CONFIGS,
)
