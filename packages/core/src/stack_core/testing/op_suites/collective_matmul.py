"""The contract suite of `collective_matmul`, over every tested number of devices that divides JAX's."""

import functools
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, spoiled

__all__ = ["SUITE"]

_KINDS = ("all_gather", "reduce_scatter")


def _across(axis_size: int, op: Callable[..., Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Runs the op on shards of the arrays and returns the concatenated results."""
    devices = jax.devices()
    if len(devices) % axis_size:
        raise unittest.SkipTest(f"needs {axis_size} devices, or a multiple; JAX has {len(devices)}")
    mesh = Mesh(np.array(devices[:axis_size]), (options["axis_name"],), axis_types=(AxisType.Auto,))
    batch = [None] * (arrays["x"].ndim - 2)
    rows, columns = P(*batch, options["axis_name"], None), P(*batch, None, options["axis_name"])
    if options["kind"] == "all_gather":
        of_x, of_weight, of_output = rows, P(None, options["axis_name"]), columns
    else:
        of_x, of_weight, of_output = columns, P(options["axis_name"], None), rows
    return jax.shard_map(
        lambda x, weight: op(x, weight, **options), mesh=mesh, in_specs=(of_x, of_weight), out_specs=of_output
    )(arrays["x"], arrays["weight"])


def _case(name: str, kind: str, axis_size: int, x: tuple[int, ...], out: int, quantized: bool = False) -> OpCase:
    """Builds a case; `x` is the full shape of the activations."""

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn: dict[str, Any] = {"x": rng.normal(size=x), "weight": rng.normal(size=(x[-1], out))}
        if quantized:
            values = rng.integers(-100, 101, size=(x[-1], out)).astype(np.int8)
            drawn["weight"] = Quantized(values, rng.uniform(0.01, 0.02, size=(x[-1] // 2, out)).astype(np.float32))
        return drawn

    return OpCase(
        "collective_matmul",
        f"{kind}_{name}_over_{axis_size}",
        arrays,
        {"axis_name": "tensor", "kind": kind},
        fixed=("weight",) if quantized else (),
        call=functools.partial(_across, axis_size),
    )


_CASES = (
    *(_case("plain", kind, axis_size, x=(2, 24, 48), out=24) for kind in _KINDS for axis_size in (1, 2, 3, 4, 6, 8)),
    *(_case("odd_sizes", kind, 2, x=(2 * 67, 2 * 19), out=2 * 5) for kind in _KINDS),
    *(_case("empty_rows", kind, 2, x=(0, 8), out=4) for kind in _KINDS),
    *(_case("quantized", kind, 2, x=(6, 24), out=10, quantized=True) for kind in _KINDS),
    *(
        spoiled(_case("not_a_number", kind, 2, (4, 8), 6), f"{kind}_not_a_number", x=((1, 3), np.nan))
        for kind in _KINDS
    ),
)

_FOR_ACCELERATORS = in_tiles(*(_case("full", kind, 1, x=(2, 64, 128), out=128) for kind in _KINDS))


def _oracle(x: Any, weight: Any, *, axis_name: str, kind: str) -> Any:
    """Computes the product of the full arrays; the kinds differ only in the sharding."""
    del axis_name, kind
    return x @ dense(weight)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
