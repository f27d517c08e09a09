"""`attention` on Hopper and Blackwell: Tokamax's Mosaic-GPU kernels, forward and backward.

The kernels support neither sinks nor segments, and average all values for a query without visible keys. This adapter
turns packed segments into a range of keys per query and other segments into a mask, zeroes the output of such queries,
and adds the sinks to the denominator afterwards: given the log-sum-exp that includes them, the kernel's own backward
pass yields correct gradients.
"""

import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward, joined_by_sinks
from stack_kernels import from_tokamax
from stack_kernels.attention.sinks import sinks_gradient
from stack_kernels.supports import first_problem

__all__ = ["TOKAMAX", "HeadTiles"]

_PLACE = "tokamax._src.ops.attention.pallas_mosaic_gpu"
_DTYPES = ("bfloat16", "float16")
_MAX_FEATURES = {("sm90", "forward"): 256, ("sm90", "backward"): 256, ("sm100", "forward"): 256}
_MAX_BLACKWELL_GRADIENT = 128  # limit of a block's shared memory
_SHARED_BYTES = 220 * 2**10
_MAX_MASK_BYTES = 2**30
_MAX_MASKED_STAGES = 3  # on Hopper, whose blocks have 16 barriers, some used by the mask


@dataclass(frozen=True)
class HeadTiles:
    """Tile sizes within a head.

    Attributes:
      queries: queries per tile, for each warpgroup.
      keys: keys per tile; in Blackwell's backward pass, the smaller side of its tiles.
      stages: number of key tiles that are prefetched.
      persistent: forward pass only: launch one block per core, each of which processes several tiles in turn.
    """

    queries: int
    keys: int
    stages: int
    persistent: bool


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    query, value = call.arrays["query"], call.arrays["value"]
    options, generation = call.options, _generation(chip)
    features = max(query.shape[3], value.shape[3])
    max_features = _MAX_FEATURES.get((generation, call.direction), _MAX_BLACKWELL_GRADIENT)
    mask_bytes = _mask_bytes(call)
    problems = {
        f"it is for h100, h200 and b200, not {chip.kind}": generation not in ("sm90", "sm100"),
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
        "it takes one query_offset for all rows, known while tracing": "query_offset" in call.arrays,
        f"a head has at most {max_features} features {call.direction}": features > max_features,
        "it caps scores after the bias": call.arrays["bias"] is not None and options["softcap"] is not None,
        f"a mask would take {mask_bytes} bytes": mask_bytes > _MAX_MASK_BYTES,
    }
    if call.direction == "backward":
        bias_bytes = _bias_bytes(call)
        problems[f"the gradient of the bias would take {bias_bytes} bytes"] = bias_bytes > _MAX_MASK_BYTES
        problems["it takes no gradient of lse"] = options["return_lse"]
        problems[f"{call.forward!r} hands it no lse"] = "lse" not in call.residuals
    elif generation == "sm100":
        problems["it takes at most 8 queries with a bias, or a multiple of 8"] = _cuts_bias(call)
    problems["a head has a multiple of 8 features"] = bool(query.shape[3] % 8 or value.shape[3] % 8)
    if not any(problems.values()):
        problems["no tile fits into shared memory"] = not list(_space(call, chip))
        problems[f"{config} does not fit the call"] = config is not None and not _fits(call, config, generation)
    problems[str(from_tokamax.missing())] = from_tokamax.missing() is not None
    return first_problem(problems)


def _generation(chip: Chip) -> str:
    return from_tokamax.GENERATIONS.get(chip.kind.partition("-")[0].lower(), "another")


def _cuts_bias(call: OpCall) -> bool:
    """Checks whether Blackwell's kernel would copy a per-query bias in tiles of 8 queries with a partial last tile."""
    bias, q_seq = call.arrays["bias"], call.arrays["query"].shape[1]
    return bias is not None and 1 not in bias.shape[2:] and q_seq > 8 and q_seq % 8 != 0


def _mask_bytes(call: OpCall) -> int:
    """Returns the bytes of the mask that `_limits` builds: all queries and keys.

    Broadcast rows and heads count once.
    """
    (batch, q_seq), kv_seq, mask = call.arrays["query"].shape[:2], call.arrays["key"].shape[1], call.arrays["mask"]
    rows, heads = (0, 1) if mask is None else mask.shape[:2]
    if _needs_mask(call.arrays["segment_ids"]):
        rows = batch
    return rows * heads * q_seq * kv_seq


def _bias_bytes(call: OpCall) -> int:
    """Returns the bytes of the bias gradient before it is summed over broadcast axes."""
    (batch, q_seq, heads), kv_seq, bias = (
        call.arrays["query"].shape[:3],
        call.arrays["key"].shape[1],
        call.arrays["bias"],
    )
    scores = batch * heads * q_seq * kv_seq
    return 0 if bias is None or bias.size == scores else scores * bias.dtype.itemsize


def _space(call: OpCall, chip: Chip) -> Iterator[HeadTiles]:
    """Yields tiles that fit into shared memory; Tokamax's first choices come first."""
    generation, backward = _generation(chip), call.direction == "backward"
    if generation not in ("sm90", "sm100"):
        return
    causal = bool(call.options["causal"]) and call.options["window"] is None
    rows = (128,) if generation == "sm100" else (64,) if backward else (64, 128)
    columns = (64,) if backward and generation == "sm90" else (128, 64)
    for queries in rows:
        for keys in columns:
            for stages in (2, 1) if backward or generation == "sm100" else (2, 3, 4):
                tiles = HeadTiles(queries, keys, stages, not causal and generation == "sm90" and not backward)
                if _fits(call, tiles, generation):
                    yield tiles


def _fits(call: OpCall, tiles: HeadTiles, generation: str) -> bool:
    if _is_masked(call) and (generation, call.direction) == ("sm90", "forward") and tiles.stages > _MAX_MASKED_STAGES:
        return False
    return _shared_bytes(call, tiles, generation) <= _SHARED_BYTES


def _is_masked(call: OpCall) -> bool:
    return call.arrays["mask"] is not None or _needs_mask(call.arrays["segment_ids"])


def _needs_mask(segments: Any) -> bool:
    return segments is not None and not isinstance(segments, ops.PackedSegments)


def _shared_bytes(call: OpCall, tiles: HeadTiles, generation: str) -> int:
    """Returns an upper bound of the shared memory per block."""
    of_key, of_value = (-(-call.arrays[name].shape[3] // 64) * 64 for name in ("query", "value"))
    extras = (call.arrays["bias"] is not None) + _is_masked(call)
    of_tile = tiles.keys * (of_key + of_value) * 2
    if call.direction == "forward":
        # On Hopper a block has two warpgroups, each with its queries.
        rows = tiles.queries * (2 if generation == "sm90" else 1)
        of_stage = of_tile + extras * rows * tiles.keys * 2
        return rows * of_key * 2 + tiles.stages * of_stage + (rows * of_value * 2 if tiles.persistent else 0)
    if generation == "sm100":  # the larger of the two kernels
        used_bytes = 128 * (of_key + of_value) * 2 + 2 * 128 * tiles.keys * 2
        return used_bytes + tiles.stages * (of_tile + extras * 128 * tiles.keys * 2)
    used_bytes = 2 * tiles.queries * (of_key + of_value) * 2 + 2 * tiles.queries * tiles.keys * 2
    return used_bytes + tiles.stages * (of_tile + extras * 2 * tiles.queries * tiles.keys * 2)


def _forward(
    *, requested: frozenset[str], config: HeadTiles, return_lse: bool, **call: Any
) -> tuple[Any, Mapping[str, Any]]:
    library = importlib.import_module(_PLACE)
    seen = _seen(call)

    def attend(query: Any, key: Any, value: Any, bias: Any, limits: Any) -> Any:
        return from_tokamax.run(
            library.PallasMosaicGpuFlashAttention(),
            _of_forward(library, config, query.shape[3], value.shape[3]),
            query,
            key,
            value,
            **_options(call, bias, limits),
            return_residuals=True,
        )

    operands = (call["query"], call["key"], call["value"], call["bias"], _limits(call))
    output, (highest, total) = from_tokamax.on_arrays(attend, *operands)
    # The sum is 0 without visible keys, where lse becomes -inf below.
    lse = (highest + jnp.log(jnp.where(total == 0, 1, total))).swapaxes(1, 2)
    lse, output = jnp.where(seen, lse, -math.inf), jnp.where(seen[..., None], output, 0)
    if call["sinks"] is not None:
        share, lse = joined_by_sinks(lse, call["sinks"])
        output = (output.astype(jnp.float32) * share[..., None]).astype(output.dtype)
    return (output, lse) if return_lse else output, {"lse": lse}


@as_backward
def _backward(call: BackwardCall, *, config: HeadTiles) -> Mapping[str, Any]:
    library = importlib.import_module(_PLACE)
    arguments = {**call.arrays, **call.options}
    seen, lse = _seen(arguments), call.residuals["lse"]
    finite_lse = jnp.where(seen, lse, 0).swapaxes(1, 2)  # without visible keys the weights are 0 at any lse
    output, cotangent = (jnp.where(seen[..., None], x, 0).astype(x.dtype) for x in (call.outputs, call.cotangents))

    def gradients(*operands: Any) -> Any:
        output, cotangent, finite_lse, query, key, value, bias, limits = operands
        forward = library.PallasMosaicGpuFlashAttention()  # its `bind` fills in defaults
        settings = forward.bind(query, key, value, **_options(arguments, bias, limits)).kwargs
        found, _ = from_tokamax.run(
            library.vjp.PallasMosaicGpuFlashAttentionVjp(),
            _of_backward(config),
            # The library saves a maximum and a sum of exponentials: the lse is a maximum whose sum is 1.
            (finite_lse, jnp.ones_like(finite_lse)),
            output,
            cotangent,
            query,
            key,
            value,
            **settings,
        )
        return tuple(found[name] for name in ("q", "k", "v", "bias") if found.get(name) is not None)

    arrays, q_seq = call.arrays, call.arrays["query"].shape[1]
    # The kernels divide by a sum of 0 in rows after the last query. Multiplied by their cotangents, which are 0, the
    # quotient is 0 in bfloat16; in float16 it is infinite, and the gradients were NaN on an H100.
    padding = -q_seq % config.queries if arrays["query"].dtype == jnp.float16 else 0
    query, output, cotangent = (_padded(x, 1, padding) for x in (arrays["query"], output, cotangent))
    bias, *limits = (_padded_queries(x, q_seq, padding) for x in (arrays["bias"], *_limits(arguments)))
    operands = (
        output,
        cotangent,
        _padded(finite_lse, 2, padding),
        query,
        arrays["key"],
        arrays["value"],
        bias,
        tuple(limits),
    )
    found = dict(zip(("query", "key", "value", "bias"), from_tokamax.on_arrays(gradients, *operands), strict=False))
    if padding:
        found["query"] = found["query"][:, :q_seq]
        if bias is not None and bias.shape[2] > 1:
            found["bias"] = found["bias"][:, :, :q_seq]
    if "sinks" in call.requested:
        found["sinks"] = sinks_gradient(call.arrays["sinks"], lse, call.outputs, call.cotangents)
    return found


def _padded(x: Any, axis: int, padding: int) -> Any:
    """Appends zeros along an axis."""
    return jnp.pad(x, [(0, padding if each == axis else 0) for each in range(x.ndim)])


def _padded_queries(x: Any, q_seq: int, padding: int) -> Any:
    """Appends zeros along axis 2, the queries, of an array that may be None or broadcast over queries."""
    return x if x is None or x.shape[2] != q_seq or q_seq == 1 else _padded(x, 2, padding)


def _of_forward(library: Any, config: HeadTiles, *features: int) -> Any:
    if config.queries == 128 and not config.persistent and library.gpu_utils.is_sm100():
        # Heads of 208 features, whose halves are not multiples of 16, did not compile when they were split.
        splits = 2 if max(features) > 192 and not any(size % 32 for size in features) else 1
        return library.ConfigSM100(
            block_q=config.queries,
            block_kv=config.keys,
            num_stages=config.stages,
            collective=False,
            num_tma_splits=splits,
        )
    return library.ConfigSM90(
        block_q=config.queries, block_kv=config.keys, num_stages=config.stages, persistent=config.persistent
    )


def _of_backward(config: HeadTiles) -> Any:
    of_hopper = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu_vjp_kernel_sm90")
    of_blackwell = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu_vjp_kernel_sm100")
    # For backward passes `_space` yields tiles of 128 queries only on Blackwell.
    made = of_blackwell.Config if config.queries == 128 else of_hopper.Config
    return made(
        block_q_dkv=config.keys if config.queries == 128 else config.queries,
        block_kv_dkv=max(config.queries, config.keys),
        block_q_dq=config.queries,
        block_kv_dq=config.keys,
        num_stages=config.stages,
    )


def _options(call: Mapping[str, Any], bias: Any, limits: Any) -> dict[str, Any]:
    base = importlib.import_module("tokamax._src.ops.attention.base")
    allowed, first, end = limits
    is_causal = end is None and call["causal"]
    return {
        "logits_scale": call["scale"],
        "logits_soft_cap": call["softcap"],
        "bias": bias,
        "mask": base.Mask(allowed, is_causal=is_causal, k_start=first, k_end=end),
    }


def _limits(call: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the mask of a call and the bounds of its keys.

    The mask is [batch, heads, q_seq, kv_seq]; the bounds are the first key and the end of the keys of each query,
    [batch, 1, q_seq]. Each is None if it masks nothing. The end is None if only `causal` limits later keys, because the
    kernel applies causality itself.
    """
    q_seq, kv_seq, mask = call["query"].shape[1], call["key"].shape[1], call["mask"]
    if _needs_mask(call["segment_ids"]):
        of_queries, of_keys = call["segment_ids"]
        same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], q_seq, kv_seq))
    left, right = call["window"] or (None, None)
    lengths, offset = call["kv_lengths"], call["query_offset"]
    place = jnp.arange(q_seq, dtype=jnp.int32) + offset
    firsts, ends = list[jax.Array](), list[jax.Array]()
    # Queries may lie beyond the keys, where a segment of theirs may have no key.
    beyond = isinstance(call["segment_ids"], ops.PackedSegments) and (offset < 0 or offset + q_seq > kv_seq)
    is_of_kernel = call["causal"] and right is None and offset == 0 and lengths is None and not beyond
    if call["causal"]:
        right = min(right or 0, 0)
    if right is not None and not is_of_kernel:
        ends.append(jnp.clip(place + right + 1, 0, kv_seq)[None, None])
    if left is not None:
        firsts.append(jnp.clip(place - left, 0, kv_seq)[None, None])
    if isinstance(call["segment_ids"], ops.PackedSegments):
        of_queries, of_keys = call["segment_ids"]
        first, end = _ranges(of_keys)
        nearest = jnp.clip(place, 0, kv_seq - 1)
        firsts.append(first[:, None, nearest])
        if beyond:
            ends.append(jnp.where(of_queries == of_keys[:, nearest], end[:, nearest], 0)[:, None])
        elif not call["causal"]:
            ends.append(end[:, None, nearest])
    if lengths is not None:
        ends.append(jnp.clip(lengths.astype(jnp.int32), 0, kv_seq)[:, None, None])
    first = functools.reduce(jnp.maximum, firsts) if firsts else None
    end = functools.reduce(jnp.minimum, ends) if ends else None
    return mask, first, end


def _ranges(segment_ids: Any) -> tuple[Any, Any]:
    """Returns the first key and the end of the run of equal ids around each key, int32[batch, kv_seq]."""
    kv_seq = segment_ids.shape[1]
    place = jnp.arange(kv_seq, dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.where(jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True), place, 0)
    end = jnp.where(jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True), place + 1, kv_seq)
    return jax.lax.cummax(first, axis=1), jax.lax.cummin(end, axis=1, reverse=True)


def _seen(call: Mapping[str, Any]) -> Any:
    """Checks which queries may attend to any key: bool[batch, q_seq, heads], of size 1 along irrelevant axes."""
    mask, first, end = _limits(call)
    q_seq, kv_seq = call["query"].shape[1], call["key"].shape[1]
    first = jnp.zeros((1, 1, 1), jnp.int32) if first is None else first
    end = jnp.full((1, 1, 1), kv_seq, jnp.int32) if end is None else end
    if mask is None:
        seen = first < end
        return jnp.broadcast_to(seen, (*seen.shape[:2], q_seq)).swapaxes(1, 2)
    place = jnp.arange(kv_seq)
    allowed = mask & (place >= first[..., None]) & (place < end[..., None])
    if call["causal"]:
        allowed &= place <= jnp.arange(q_seq)[:, None] + call["query_offset"]
    return jnp.any(allowed, axis=3).swapaxes(1, 2)


TOKAMAX = OpImplementation(
    "attention",
    "tokamax",
    _forward,
    _backward,
    platforms=("gpu",),
    supports=_supports,
    default=lambda call, chip: next(_space(call, chip), None),
    space=_space,
    residuals=("lse",),
    is_opaque=True,
    exports=False,
    priority=2,
)
