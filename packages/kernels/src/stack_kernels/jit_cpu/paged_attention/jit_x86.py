"""`paged_attention` on CPUs in machine code: decoding and prompts of any length."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import (
    as_int32,
    bounded_places,
    forward_only,
    is_quantized,
    padding_as_zero,
    with_sinks,
)
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.numbers import BITS, WRITTEN
from stack_kernels.jit_cpu.paged_attention.call import PagedAttention
from stack_kernels.jit_cpu.paged_attention.tiles import paged_attention_module
from stack_kernels.paged_attention.xla_cpu import values_like_keys
from stack_kernels.supports import abstract_view, takes_no

__all__ = ["JIT_X86"]

_MIN_LANES = 4
_WIDEST = 256
_MAX_GROUP = 512
"""With this many query heads of the maximum width, the sums take half a MiB of a thread's scratchpad."""


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    arrays = call.arrays
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(arrays))):
        return "it computes in float32, and an array is float64"
    for answer in (
        takes_no(call, "ahead"),
        values_like_keys(call),
        *(_reads(arrays[name]) for name in ("key_pages", "value_pages")),
    ):
        if answer is not True:
            return answer
    if jax.tree.map(jnp.dtype, arrays["key_pages"]) != jax.tree.map(jnp.dtype, arrays["value_pages"]):
        return "keys and values are of different dtypes"
    group = arrays["query"].shape[1] // _kv_heads(arrays["key_pages"], call.options["layout"])
    if group > _MAX_GROUP:
        return f"it is for up to {_MAX_GROUP} query heads of a key head, not {group}"
    answer = _answers(arrays["query"])
    return host.on_this_cpu(call, chip) if answer is True else answer


def _kv_heads(pages: Any, layout: str) -> int:
    values = abstract_view(pages).qvalue if is_quantized(pages) else pages
    return values.shape[layout.index("h")]


def _answers(query: Any) -> bool | str:
    if query.dtype.name not in WRITTEN:
        return f"it is for queries of {', '.join(WRITTEN)}, not {query.dtype.name}"
    head_dim = query.shape[-1]
    fits = head_dim % _MIN_LANES == 0 and head_dim <= _WIDEST
    return fits or f"it is for a head_dim that is a multiple of {_MIN_LANES} up to {_WIDEST}, not {head_dim}"


def _reads(pages: Any) -> bool | str:
    if pages is None:
        return "there are no pages"
    if not is_quantized(pages):
        return pages.dtype.name in BITS or f"it does not read {pages.dtype.name}"
    view = abstract_view(pages)
    name, shape = view.qvalue.dtype.name, view.qvalue.shape
    is_plain = view.zero_point is None and view.codebook is None and BITS.get(name, 0) == 8
    return (is_plain and view.scale.shape == (*shape[:-1], 1)) or f"it does not read {view.scheme}"


def _llvm(query: Any, key_pages: Any, value_pages: Any, *, sinks: Any, window: Any, **call: Any) -> jax.Array:
    tokens, heads, head_dim = query.shape
    pools = [key_pages, value_pages]
    views = [pool.__stack_qview__() for pool in pools] if is_quantized(key_pages) else []
    if views:
        pools = [view.qvalue for view in views]
    sizes = dict(zip(call["layout"], pools[0].shape, strict=True))
    lanes = _lanes(head_dim)
    attention = PagedAttention(
        lanes=lanes,
        query="bfloat16" if _has_bf16_dot(query, pools[0], lanes) else "float32",
        pages=pools[0].dtype.name,
        # Sinks rescale the output, which is rounded only after that.
        output=query.dtype.name if sinks is None else "float32",
        scaled=bool(views),
        layout=call["layout"],
        heads=heads,
        kv_heads=sizes["h"],
        head_dim=head_dim,
        slots=sizes["s"],
        scale=float(call["scale"]),
        softcap=call["softcap"],
        left=_left(window, call["block_tables"].shape[1] * sizes["s"]),
    )
    places = [as_int32(call[name]) for name in ("block_tables", "kv_lengths", "query_starts")]
    by_head = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    results = (jax.ShapeDtypeStruct(query.shape, attention.output), by_head, by_head)
    arguments = [query.astype(attention.query), *pools, *places, *(view.scale.astype(jnp.float32) for view in views)]
    build = functools.partial(paged_attention_module, attention)
    output, maximum, total = host.kernel_call(attention.name, build, results, *arguments)
    if sinks is not None:
        grouped = (tokens, sizes["h"], heads // sizes["h"], 1)
        # -inf for tokens without visible keys, whose maximum and sum are 0.
        lse = (maximum + jnp.log(total)).reshape(grouped)
        output = with_sinks(output.reshape(*grouped, head_dim), lse, sinks)[0].reshape(query.shape)
        bounds = {"pages": sizes["p"], "slots": sizes["s"], "tokens": tokens}
        output = padding_as_zero(output, bounded_places(*places, **bounds)[2])
    return output.astype(query.dtype)


def _left(window: Any, max_keys: int) -> int | None:
    """Returns the number of earlier keys that a query sees; None if that covers all possible keys."""
    left = None if window is None else window[0]
    return None if left is None or left >= max_keys else left


def _lanes(head_dim: int) -> int:
    """Returns the lanes of the widest vectors of this processor that evenly divide a head."""
    processor = host.this_processor()
    assert processor is not None, "on_this_cpu refused"
    return math.gcd(head_dim, processor.lanes)


def _has_bf16_dot(query: jax.Array, pages: jax.Array, lanes: int) -> bool:
    processor = host.this_processor()
    has_dot = processor is not None and processor.has_bf16_dot and lanes == processor.lanes
    return has_dot and query.dtype == pages.dtype == jnp.bfloat16 and query.shape[-1] % (2 * lanes) == 0


JIT_X86 = OpImplementation(
    op="paged_attention",
    name="jit_x86",
    forward=forward_only(_llvm),
    platforms=("cpu",),
    supports=_supports,
    is_opaque=True,
    exports=False,
    priority=2,
)
