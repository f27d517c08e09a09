"""The contract suite of `ring_attention`, over every tested number of devices that divides JAX's."""

import functools
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core.ops.definitions.attention import PackedSegments
from stack_core.testing.cases import OpCase, OpSuite, in_tiles, integers, spoiled
from stack_core.testing.op_suites import attention

__all__ = ["SUITE"]

_BY_SEQUENCE = ("query", "key", "value")


def _places(seq: int, devices: int, order: str) -> np.ndarray:
    """Returns the positions of a sequence in the order in which the devices store them."""
    if order == "contiguous":
        return np.arange(seq)
    blocks = np.split(np.arange(seq), 2 * devices)
    return np.concatenate([blocks[place] for device in range(devices) for place in (device, 2 * devices - 1 - device)])


def _across(devices: int, op: Callable[..., Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Runs the op on shards of the arrays and returns the results in sequence order."""
    found = jax.devices()
    if len(found) % devices:
        raise unittest.SkipTest(f"needs {devices} devices, or a multiple; JAX has {len(found)}")
    mesh = Mesh(np.array(found[:devices]), (options["axis_name"],), axis_types=(AxisType.Auto,))
    split, order = P(None, options["axis_name"]), options["order"]

    def spread(name: str, x: Any) -> Any:
        if name not in (*_BY_SEQUENCE, "segment_ids"):
            return x
        return jax.tree.map(lambda x: x[:, _places(x.shape[1], devices, order)], x)

    specs = {name: split if name in (*_BY_SEQUENCE, "segment_ids") else P() for name in arrays}
    out_specs = (split, split) if options.get("return_lse") else split
    mapped = jax.shard_map(lambda arrays: op(**arrays, **options), mesh=mesh, in_specs=(specs,), out_specs=out_specs)(
        {name: spread(name, x) for name, x in arrays.items()}
    )
    back = np.argsort(_places(arrays["query"].shape[1], devices, order))
    return jax.tree.map(lambda x: x[:, back], mapped)


def _case(
    name: str,
    devices: int,
    *,
    sizes: tuple[int, int, int, int, int, int] = (2, 16, 16, 4, 2, 8),
    value_dim: int | None = None,
    order: str = "zigzag",
    extra: Callable[[np.random.Generator], Mapping[str, Any]] = lambda rng: {},
    **options: Any,
) -> OpCase:
    """Builds a case; `sizes` are (batch, q_seq, kv_seq, heads, kv_heads, key_dim), `value_dim` defaults to key_dim."""
    batch, q_seq, kv_seq, heads, kv_heads, key_dim = sizes

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {
            "query": rng.normal(size=(batch, q_seq, heads, key_dim)),
            "key": rng.normal(size=(batch, kv_seq, kv_heads, key_dim)),
            "value": rng.normal(size=(batch, kv_seq, kv_heads, value_dim or key_dim)),
            **extra(rng),
        }

    options = {"axis_name": "context", "order": order, **options}
    call = functools.partial(_across, devices)
    return OpCase("ring_attention", f"{name}_over_{devices}", arrays, options, call=call)


_SEGMENTS = integers([1] * 5 + [2] * 7 + [3] * 2 + [0] * 2, [1] + [2] * 11 + [3] * 4)

_CASES = (
    *(_case("causal", devices, causal=True) for devices in (1, 2, 4, 8)),
    *(_case("contiguous", devices, order="contiguous", causal=True, return_lse=True) for devices in (1, 3, 8)),
    _case("plain", 4),
    _case("window", 4, causal=True, window=(3, None), return_lse=True),
    _case("window_to_the_right", 2, window=(1, 2)),
    _case("segments", 4, causal=True, extra=lambda rng: {"segment_ids": _SEGMENTS}),
    _case("fewer_queries", 2, sizes=(1, 6, 14, 3, 1, 4), order="contiguous", causal=True),
    _case("offset_per_row", 2, causal=True, extra=lambda rng: {"query_offset": integers(2, -3)}, return_lse=True),
    _case("kv_lengths", 4, extra=lambda rng: {"kv_lengths": integers(5, 0)}, return_lse=True),
    _case("sinks", 2, causal=True, extra=lambda rng: {"sinks": rng.normal(size=4)}, return_lse=True),
    _case("narrow_values", 2, causal=True, value_dim=3, softcap=1.5),
    _case(
        "everything",
        4,
        extra=lambda rng: {
            "segment_ids": _SEGMENTS,
            "kv_lengths": integers(11, 15),
            "sinks": rng.normal(size=4),
            "query_offset": integers(1, 0),
        },
        value_dim=5,
        causal=True,
        window=(6, None),
        softcap=2.0,
        scale=0.5,
        return_lse=True,
    ),
    spoiled(_case("", 2, causal=True), "not_a_number_over_2", query=((0, 2, 3), np.nan), value=((0, 0, 0, 5), np.nan)),
)

_TILES = (1, 192, 192, 4, 2, 64)
_IN_TILES = integers(np.repeat([1, 2, 3, 0], (100, 29, 51, 12)))
"""Contiguous segments that end inside blocks of 64 keys."""

_FOR_ACCELERATORS = in_tiles(
    _case("full", 1, sizes=_TILES),
    _case("window_in_tiles", 1, sizes=_TILES, causal=True, window=(70, None)),
    _case("segments_in_tiles", 1, sizes=_TILES, causal=True, extra=lambda rng: {"segment_ids": _IN_TILES}),
    _case("packed", 1, sizes=_TILES, causal=True, extra=lambda rng: {"segment_ids": PackedSegments.of(_IN_TILES)}),
    _case(
        "packed_in_a_window",
        1,
        sizes=_TILES,
        order="contiguous",
        causal=True,
        window=(40, None),
        extra=lambda rng: {"segment_ids": PackedSegments.of(_IN_TILES)},
    ),
    _case("narrow_values_in_tiles", 1, sizes=(1, 128, 128, 2, 2, 192), value_dim=128, causal=True),
    _case("sinks_in_tiles", 1, sizes=_TILES, causal=True, extra=lambda rng: {"sinks": rng.normal(size=4)}),
    _case("heads_of_128", 1, sizes=(1, 128, 128, 4, 2, 128), causal=True),
    _case("heads_of_64", 1, sizes=(2, 64, 128, 2, 2, 64), extra=lambda rng: {"kv_lengths": integers(0, 100)}),
)


def _oracle(*arrays: Any, axis_name: str, order: str, **options: Any) -> Any:
    """Computes attention over the full sequence."""
    del axis_name, order
    return attention.SUITE.oracle(*arrays, **options)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
