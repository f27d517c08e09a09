"""`paged_attention` on GPUs for decoding: each query reads the pages of its own sequence in place.

A program of the grid attends the query heads of one key head to a part of the keys. Splitting a sequence over several
programs (flash decoding) keeps the whole GPU busy with few sequences; the parts are then joined by their log-sum-exp.

The kernel is written in Pallas and compiled by the Triton inside jaxlib. JAX deprecated this backend in 0.11 in favor
of Mosaic GPU, for which it has no paged attention. Kernels that exist elsewhere do not fit:

- jax's Triton kernel `pallas.ops.gpu.paged_attention` reads unused slots (0 * NaN), and has neither windows nor sinks
  (jax 0.11.2; axlearn's port adds windows);
- jax's Triton kernel `pallas.ops.gpu.decode_attention` has neither pages nor softcap nor sinks, and copies keys and
  values to put heads first (jax 0.11.2, deprecated; axlearn's version does not copy, and adds windows);
- jax's Mosaic kernel `pallas.ops.gpu.attention_mgpu` has neither pages nor lengths, requires a multiple of 128
  queries, and is for Hopper (jax 0.11.2);
- cuDNN's paged attention requires a pool with exactly the pages of this call's tables, and has neither softcap nor
  sinks;
- FlashInfer plans each call on the host, which cannot be part of a loop on the device;
- CUTLASS' Python DSL calls kernels from JAX (`cutlass.jax.cutlass_call`) but has none: its example of paged decoding is
  for latents on Blackwell, and calls lower only for CUDA, so no CPU can check them (nvidia-cutlass-dsl 4.8.1).
  FlashAttention-4, in this DSL, has pages, but requires PyTorch (flash-attn-4 4.0.0b36); its port to JAX has no pages
  (fa4-jax 0.1.0);
- FlashAttention-3 for JAX has pages, but neither softcap nor sinks; its wheel is for Hopper, CUDA 12 and heads of 128
  (flash-attn3-jax 0.2.3).

On an H100, with a step as one CUDA graph, a Llama of 1.1B parameters decoded 785 to 791 tokens/s at 1 row and 17,103 at
32; docs/accelerators.md has the comparison.

Source: Dao et al., Flash-Decoding for long-context inference, 2023; Kwon et al., 2023 (arXiv:2309.06180).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import bounded_places, forward_only
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import first_problem, takes_no, unquantized

__all__ = ["TRITON_GPU", "DecodeTiles", "triton_gpu"]

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (16, 32, 64, 128, 256)
_LEAST_ROWS = 16  # of a product on tensor cores
_PROGRAMS = 264  # two for each core of an H100
_LEAST_SPLIT_KEYS = 256  # a shorter part takes less time than joining it
_MOST_SPLITS = 16
_LOG2E = float(np.log2(np.e))
# Not -inf: the difference of two maxima must not be NaN while a query has seen no key.
_LOWEST = -0.7 * float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class DecodeTiles:
    """Division of the work.

    Attributes:
      keys: number of keys per iteration, a power of two >= 16.
      splits: number of programs that share the keys of a sequence.
      warps: number of warps per program.
      stages: number of iterations whose keys and values are in flight.
    """

    keys: int
    splits: int
    warps: int = 4
    stages: int = 2


def triton_gpu(*, interpret: bool = False, tiles: DecodeTiles | None = None) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: whether to interpret the kernel, on any device.
      tiles: division of the work; None chooses it by the sizes of the call.
    """
    return OpImplementation(
        "paged_attention",
        "triton_gpu",
        forward_only(lambda **call: _attention(**call, interpret=interpret)),
        platforms=("gpu",),
        supports=_supports,
        default=_default if tiles is None else lambda call, chip: tiles,
        space=_space,
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    for answer in (unquantized(call, chip), takes_no(call, "ahead")):
        if answer is not True:
            return answer
    query, keys, values, tables = (call.arrays[name] for name in ("query", "key_pages", "value_pages", "block_tables"))
    layout = call.options["layout"]
    if values is None and "2" not in layout:
        return "it reads values from pages of their own, and not from the keys'"
    tokens, heads, head_dim = query.shape
    widths = {keys.shape[-1], (keys if values is None else values).shape[-1]}
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
        f"it takes keys and values of one width among {', '.join(map(str, _HEAD_DIMS))}, not {sorted(widths)}": len(
            widths
        )
        > 1
        or head_dim not in _HEAD_DIMS,
        "a pool has 2**31 numbers or more": keys.size >= 2**31,
        "there are no pages": min(*keys.shape, tables.size, query.size) == 0,
        f"it is for decoding, and {tokens} queries are two or more for each of {tables.shape[0]} sequences": tokens
        >= 2 * tables.shape[0],
        f"{heads // max(keys.shape[layout.index('h')], 1)} query heads of a key head are more than 64": heads
        > 64 * keys.shape[layout.index("h")],
    }
    return first_problem(problems)


def _max_keys(call: OpCall) -> int:
    keys = call.arrays["key_pages"].shape[call.options["layout"].index("s")]
    return int(call.arrays["block_tables"].shape[1] * keys)


def _default(call: OpCall, chip: Chip) -> DecodeTiles | None:
    """Splits sequences until the GPU is busy, while each part has enough keys."""
    if unquantized(call, chip) is not True:
        return None
    query, pages = call.arrays["query"], call.arrays["key_pages"]
    programs = query.shape[0] * pages.shape[call.options["layout"].index("h")]
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * _LEAST_SPLIT_KEYS <= _max_keys(call) and splits * programs < _PROGRAMS:
        splits *= 2
    return DecodeTiles(keys=64 if query.shape[-1] >= 128 else 128, splits=splits)


def _space(call: OpCall, chip: Chip) -> Iterator[DecodeTiles]:
    if (default := _default(call, chip)) is None:
        return
    yield default
    for keys in (128, 64, 32):
        for splits in (1, 2, 4, 8, 16):
            for warps in (4, 2, 8):
                for stages in (2, 3, 4):
                    if splits == 1 or splits * keys <= _max_keys(call):
                        yield DecodeTiles(keys, splits, warps, stages)


def _attention(
    query: Any, key_pages: Any, value_pages: Any, *, config: DecodeTiles, interpret: bool, **call: Any
) -> Any:
    tokens, heads, head_dim = query.shape
    layout = call["layout"]
    sizes = dict(zip(layout, key_pages.shape, strict=True))
    places = (call[name] for name in ("block_tables", "kv_lengths", "query_starts"))
    tables, kv_lengths, query_starts = bounded_places(*places, pages=sizes["p"], slots=sizes["s"], tokens=tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    after = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(after, tables.shape[0] - 1)
    # The last token of a sequence is at its last key; each earlier token sees one key less.
    ends = kv_lengths[sequence] - (query_starts[sequence + 1] - token) + 1
    is_padding = (token < query_starts[0]) | (token >= query_starts[-1])
    ends = jnp.where(is_padding, 0, jnp.maximum(ends, 0))
    left = None if call["window"] is None else call["window"][0]
    begins = jnp.zeros_like(ends) if left is None else jnp.maximum(ends - 1 - left, 0)

    # A pool is read as rows of head_dim numbers, whatever its layout.
    axes = layout[:-1]
    strides = {axis: int(np.prod([sizes[after] for after in axes[place + 1 :]])) for place, axis in enumerate(axes)}
    pools = [pool.reshape(-1, head_dim) for pool in (key_pages, value_pages) if pool is not None]
    sinks: list[Any] = [] if call["sinks"] is None else [call["sinks"].astype(jnp.float32)]
    step = _Step(
        group=heads // sizes["h"],
        slots=sizes["s"],
        strides=(strides["p"], strides["s"], strides["h"]),
        value_offset=strides.get("2", 0),
        # A multiple of the block, so that no key is visited twice.
        split_keys=-(-tables.shape[1] * sizes["s"] // (config.splits * config.keys)) * config.keys,
        scale=call["scale"],
        softcap=call["softcap"],
        has_values=value_pages is not None,
        has_sinks=bool(sinks),
        tiles=config,
    )
    places = jnp.stack([sequence, begins, ends], axis=1)
    return untyped(functools.partial(_run, step=step, interpret=interpret), tables, places, query, *pools, *sinks)


@dataclass(frozen=True)
class _Step:
    """Static properties of the kernel.

    Attributes:
      group: query heads per key head.
      slots: slots per page.
      strides: distances, in rows of the flat pool, of neighbors along the pages, slots and key heads.
      value_offset: distance from a key to its value in a pool with both, else 0.
      split_keys: number of keys per split.
      scale: factor of the scores.
      softcap: softcap of the scores, or None.
      has_values: whether values have a pool of their own.
      has_sinks: whether the softmax has sinks.
      tiles: division of the work.
    """

    group: int
    slots: int
    strides: tuple[int, int, int]
    value_offset: int
    split_keys: int
    scale: float
    softcap: float | None
    has_values: bool
    has_sinks: bool
    tiles: DecodeTiles


def _run(tables: Any, places: Any, query: Any, *pools_and_sinks: Any, step: _Step, interpret: bool) -> Any:
    """Runs the kernel on [tokens, heads, head_dim] and joins the splits."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    tokens, heads, head_dim = query.shape
    tiles = step.tiles
    is_whole = tiles.splits == 1
    shape = (tiles.splits, tokens, heads)
    out_shape: list[Any] = [jax.ShapeDtypeStruct((*shape, head_dim), query.dtype if is_whole else jnp.float32)]
    out_shape += [] if is_whole else [jax.ShapeDtypeStruct(shape, jnp.float32)]
    output, *lse = pl.pallas_call(
        functools.partial(_kernel, step=step),
        out_shape=out_shape,
        grid=(tokens, heads // step.group, tiles.splits),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="stack_paged_attention",
    )(tables, places, query, *pools_and_sinks)
    return output[0] if is_whole else _joined(output, lse[0], pools_and_sinks[-1] if step.has_sinks else None, query)


def _joined(output: Any, lse: Any, sinks: Any, query: Any) -> Any:
    """Joins the outputs [splits, tokens, heads, head_dim] of the splits by their log-sum-exp (base 2)."""
    highest = jnp.max(lse, axis=0)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks * _LOG2E)
    weights = jnp.exp2(lse - highest)
    total = jnp.sum(weights, axis=0)
    if sinks is not None:
        total += jnp.exp2(sinks * _LOG2E - highest)
    joined = jnp.sum(output * weights[..., None], axis=0) / total[..., None]
    return joined.astype(query.dtype)


def _kernel(tables: Any, places: Any, query: Any, keys: Any, *refs: Any, step: _Step) -> None:
    """Attends the query heads of a key head of one token to the keys of one split."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    rest = list(refs)
    values = rest.pop(0) if step.has_values else keys
    sinks = rest.pop(0) if step.has_sinks else None
    output, *lse = rest
    token, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim, block = query.shape[-1], step.tiles.keys
    sequence, begin, end = places[token, 0], places[token, 1], places[token, 2]
    # Rows beyond the group are padding, which the tensor cores need.
    row = jnp.arange(max(_LEAST_ROWS, 1 << (step.group - 1).bit_length()))
    own, is_row = head * step.group + row, row < step.group
    feature = jnp.arange(head_dim)

    def is_read(is_row: Any) -> Any:
        return lax.broadcast_in_dim(is_row, (*is_row.shape, head_dim), (0,))

    q = plgpu.load(query.at[token, own[:, None], feature[None, :]], mask=is_read(is_row), other=0.0)
    per_page, per_slot, per_head = step.strides

    def visit(number: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        highest, total, weighted = state
        key = number * block + jnp.arange(block)
        is_visible = (key >= begin) & (key < end)
        page = plgpu.load(tables.at[sequence, key // step.slots], mask=is_visible, other=0)
        place = page * per_page + (key % step.slots) * per_slot + head * per_head

        # Unused slots may hold NaN, so they are not read at all.
        def read(pool: Any, offset: int) -> Any:
            rows = (place + offset)[:, None]
            return plgpu.load(pool.at[rows, feature[None, :]], mask=is_read(is_visible), other=0.0)

        scores = _dot(q, read(keys, 0), 1) * step.scale
        if step.softcap is not None:
            scores = step.softcap * jnp.tanh(scores / step.softcap)
        scores = jnp.where(is_visible[None, :], scores * _LOG2E, _LOWEST)
        now = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.where(is_visible[None, :], jnp.exp2(scores - now[:, None]), 0.0)
        shrink = jnp.exp2(highest - now)
        value = read(values, step.value_offset)
        weighted = weighted * shrink[:, None] + _dot(weights.astype(value.dtype), value, 0)
        return now, total * shrink + jnp.sum(weights, axis=1), weighted

    first_key = jnp.maximum(begin, split * step.split_keys)
    last_key = jnp.minimum(end, (split + 1) * step.split_keys)
    empty = (jnp.full(row.shape, _LOWEST, jnp.float32), jnp.zeros(row.shape, jnp.float32))
    state = (*empty, jnp.zeros((*row.shape, head_dim), jnp.float32))
    highest, total, weighted = lax.fori_loop(first_key // block, (last_key + block - 1) // block, visit, state)
    if sinks is not None and step.tiles.splits == 1:
        sink = plgpu.load(sinks.at[own], mask=is_row, other=0.0) * _LOG2E
        joined = jnp.maximum(highest, sink)
        factor = jnp.exp2(highest - joined)
        total, weighted = total * factor + jnp.exp2(sink - joined), weighted * factor[:, None]
    is_empty = total == 0
    share = weighted / jnp.where(is_empty, 1.0, total)[:, None]
    target = output.at[split, token, own[:, None], feature[None, :]]
    plgpu.store(target, share.astype(output.dtype), mask=is_read(is_row))
    if lse:
        found = jnp.where(is_empty, _LOWEST, highest + jnp.log2(jnp.where(is_empty, 1.0, total)))
        plgpu.store(lse[0].at[split, token, own], found, mask=is_row)


def _dot(left: Any, right: Any, axis: int) -> Any:
    """Computes left[m, k] times right in fp32; `axis` is the k axis of right."""
    return lax.dot_general(left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


TRITON_GPU = triton_gpu()
