"""`attention` on TPUs: the splash kernel of the jax wheel.

The kernel requires full tiles, averages all values of a tile for a query without visible keys, and does not scale
scores. This adapter pads operands to tiles, zeroes the output of such queries, and scales the queries.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward
from stack_kernels.attention.sinks import sinks_gradient
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import first_problem, takes_no

__all__ = ["SPLASH", "SplashTiles", "splash"]

_LANES = 128
_DEFAULT = 512
_DTYPES = ("bfloat16", "float32")
_NOWHERE = np.iinfo(np.int32).min
"""Segment id of keys that no query may attend to."""


@dataclass(frozen=True)
class SplashTiles:
    """Tile size of the scores: queries and keys, multiples of 128."""

    queries: int
    keys: int


def splash(*, interpret: Any = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True, or `pltpu.InterpretParams`, interprets the kernel on any device.
    """
    return OpImplementation(
        "attention",
        "splash",
        lambda **call: _forward(**call, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
        platforms=("tpu",),
        supports=_supports,
        default=_default,
        space=_space,
        residuals=("lse",),
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    query, key = call.arrays["query"], call.arrays["key"]
    if (refusal := takes_no(call, "bias", "mask")) is not True:
        return refusal
    problems = {
        "it takes one query_offset for all rows, known while tracing": "query_offset" in call.arrays,
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
    }
    if not any(problems.values()):
        # Not before: an offset that is an array is missing among the options.
        problems["no query may attend to any key"] = not _Span.of(call.options).is_seen(query.shape[1], key.shape[1])
    if call.direction == "backward":
        problems["it takes no gradient of lse"] = call.options["return_lse"]
        problems[f"{call.forward!r} hands it no lse"] = "lse" not in call.residuals
    return first_problem(problems)


def _default(call: OpCall, chip: Chip) -> SplashTiles:
    return SplashTiles(*(min(_DEFAULT, _ceil(call.arrays[name].shape[1], _LANES)) for name in ("query", "key")))


def _space(call: OpCall, chip: Chip) -> Iterator[SplashTiles]:
    queries, keys = (_ceil(call.arrays[name].shape[1], _LANES) for name in ("query", "key"))
    sizes = (128, 256, 512, 1024, 2048)
    for of_queries in sizes:
        for of_keys in sizes:
            if of_queries <= queries and of_keys <= keys:
                yield SplashTiles(of_queries, of_keys)


@dataclass(frozen=True)
class _Span:
    """Keys visible to a query at key position p: p - first .. p + last; None means no limit.

    `offset` is query 0's position.
    """

    first: int | None
    last: int | None
    offset: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "_Span":
        left, right = options["window"] or (None, None)
        if options["causal"]:
            right = 0 if right is None else min(right, 0)
        return cls(left, right, options["query_offset"])

    def is_seen(self, queries: int, keys: int) -> bool:
        """Checks whether any query may attend to any key."""
        sees_first = self.last is None or queries - 1 + self.offset + self.last >= 0
        return sees_first and (self.first is None or self.offset - self.first <= keys - 1)

    def ends_before(self, queries: int, keys: int) -> bool:
        """Checks whether the visible keys of every query end before the padding."""
        return self.last is not None and queries - 1 + self.offset + self.last < keys


@dataclass(frozen=True)
class _Problem:
    """A call in the kernel's terms: head-major arrays in full tiles."""

    scale: float
    span: _Span
    softcap: float | None
    tiles: SplashTiles
    interpret: Any

    @classmethod
    def of(cls, options: Mapping[str, Any], config: SplashTiles, interpret: Any) -> "_Problem":
        return cls(options["scale"], _Span.of(options), options["softcap"], config, interpret)

    def kernel(self, heads: int, queries: int, keys: int) -> Any:
        """Builds the kernel for one batch row; it returns the output and a tuple with lse[heads, queries]."""
        from jax.experimental.pallas.ops.tpu import splash_attention as library

        span, rows, columns = self.span, self.tiles.queries, self.tiles.keys
        mask: Any = library.FullMask((queries, keys))
        if (span.first, span.last) != (None, None):
            mask = library.LocalMask((queries, keys), (span.first, span.last), span.offset)
        sizes = library.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        )
        return library.make_splash_mha(
            library.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            # Also where no gradient follows: the lse shows which queries saw no key.
            save_residuals=True,
            attn_logits_soft_cap=self.softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def by_row(self, function: Callable[..., Any], sinks: Any, *arrays: Any) -> Any:
        """Maps `function(sinks, *row)` over the batch rows.

        Works inside `jax.shard_map`, whose types the kernel lacks.
        """

        def over_batch(sinks: Any, *arrays: Any) -> Any:
            if isinstance(self.interpret, bool):
                return jax.vmap(partial(function, sinks))(*arrays)
            # The TPU interpreter does not support a grid extended by `jax.vmap`.
            rows = [function(sinks, *jax.tree.map(lambda x, row=row: x[row], arrays)) for row in range(len(arrays[0]))]
            return jax.tree.map(lambda *of_rows: jnp.stack(of_rows), *rows)

        return untyped(over_batch, sinks, *arrays)

    def operands(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns query, key and value as [batch, heads, seq, features], and the pair of segment ids or None."""
        # The kernel has no scale: the queries carry it, and `_backward` scales their gradient.
        query = (arrays["query"].astype(jnp.float32) * self.scale).astype(arrays["query"].dtype)
        return {
            "query": _tiled(query, self.tiles.queries),
            "key": _tiled(arrays["key"], self.tiles.keys),
            "value": _tiled(arrays["value"], self.tiles.keys),
            "segments": self._segments(arrays),
        }

    def _segments(self, arrays: Mapping[str, Any]) -> Any:
        """Returns segment ids of queries and keys, int32[batch, seq].

        Keys beyond a row's length and padding get `_NOWHERE`.
        """
        (batch, q_seq), kv_seq = arrays["query"].shape[:2], arrays["key"].shape[1]
        segment_ids, lengths = arrays["segment_ids"], arrays["kv_lengths"]
        padded = kv_seq % self.tiles.keys and not self.span.ends_before(q_seq, kv_seq)
        if segment_ids is None and lengths is None and not padded:
            return None
        zeros = (jnp.zeros((batch, q_seq), jnp.int32), jnp.zeros((batch, kv_seq), jnp.int32))
        of_queries, of_keys = zeros if segment_ids is None else (ids.astype(jnp.int32) for ids in segment_ids)
        if lengths is not None:
            of_keys = jnp.where(jnp.arange(kv_seq) < lengths[:, None], of_keys, _NOWHERE)
        return (
            _padded(of_queries, self.tiles.queries, axis=1),
            _padded(of_keys, self.tiles.keys, axis=1, value=_NOWHERE),
        )


def _forward(
    *, interpret: Any, requested: frozenset[str], config: SplashTiles, return_lse: bool, **call: Any
) -> tuple[Any, Mapping[str, Any]]:
    problem = _Problem.of(call, config, interpret)
    operands, sinks, q_seq = problem.operands(call), _wide(call["sinks"]), call["query"].shape[1]
    kernel = problem.kernel(call["query"].shape[2], operands["query"].shape[2], operands["key"].shape[2])

    def of_row(sinks: Any, query: Any, key: Any, value: Any, segments: Any) -> tuple[Any, Any]:
        output, (lse,) = kernel(query, key, value, segment_ids=_pair(segments), sinks=sinks)
        return output, lse

    output, lse = problem.by_row(of_row, sinks, *operands.values())
    # The kernel's scores of masked keys are finite. The comparison is False for NaN, so NaN is not masked as empty.
    empty = lse <= kernel.kwargs["mask_value"] / 2
    output = jnp.where(empty[..., None], 0, output)[:, :, :q_seq].swapaxes(1, 2)
    lse = jnp.where(empty, -math.inf, lse)[:, :, :q_seq].swapaxes(1, 2)
    return (output, lse) if return_lse else output, {"lse": lse}


@as_backward
def _backward(call: BackwardCall, *, interpret: Any, config: SplashTiles) -> Mapping[str, Any]:
    # JAX's own gradient of the kernel would run its forward pass again.
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import _splash_attention_bwd

    arrays, lse = call.arrays, call.residuals["lse"]
    problem, sinks = _Problem.of(call.options, config, interpret), _wide(arrays["sinks"])
    operands = problem.operands(arrays)
    kernel = problem.kernel(arrays["query"].shape[2], operands["query"].shape[2], operands["key"].shape[2])
    settings = {name: kernel.kwargs[name] for name in ("mask_value", "is_mqa", "block_sizes", "mask_function")}
    settings |= {name: kernel.kwargs[name] for name in ("attn_logits_soft_cap", "residual_checkpoint_name")}

    def of_row(
        sinks: Any, output: Any, lse: Any, cotangent: Any, query: Any, key: Any, value: Any, segments: Any
    ) -> Any:
        # In the order in which the library's own forward rule saves its residuals.
        residuals = (query, key, value, _pair(segments), sinks, output, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        gradients = _splash_attention_bwd(
            save_residuals=False, interpret=problem.interpret, res=residuals, do=cotangent, **settings
        )
        # The first three belong to the mask infos.
        return gradients[3:6]

    output, cotangent = (_tiled(x, config.queries) for x in (call.outputs, call.cotangents))
    finite = jnp.where(jnp.isneginf(lse), 0, lse)  # without visible keys the weights are 0 at any lse
    rows = _padded(finite.swapaxes(1, 2), config.queries, axis=2)
    of_query, of_key, of_value = problem.by_row(of_row, sinks, output, rows, cotangent, *operands.values())
    found = {
        "query": _untiled(of_query, arrays["query"]) * problem.scale,
        "key": _untiled(of_key, arrays["key"]),
        "value": _untiled(of_value, arrays["value"]),
    }
    if "sinks" in call.requested:
        found["sinks"] = sinks_gradient(sinks, lse, call.outputs, call.cotangents)
    return found


def _wide(sinks: Any) -> Any:
    return None if sinks is None else sinks.astype(jnp.float32)


def _pair(segments: Any) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    return None if segments is None else library.SegmentIds(*segments)


def _tiled(array: Any, tile: int) -> Any:
    """Transposes [batch, seq, heads, features] to [batch, heads, seq, features] and pads seq to full tiles."""
    return _padded(array.swapaxes(1, 2), tile, axis=2)


def _untiled(array: Any, like: Any) -> Any:
    """Inverts `_tiled`, with the shape of `like`."""
    return array.swapaxes(1, 2)[:, : like.shape[1]]


def _padded(array: Any, multiple: int, *, axis: int, value: int = 0) -> Any:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths, constant_values=value)


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


SPLASH = splash()
