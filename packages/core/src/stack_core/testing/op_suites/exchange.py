"""The contract suite of `exchange`, over every tested number of devices that divides JAX's."""

import functools
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core.testing.cases import OpCase, OpSuite, in_tiles

__all__ = ["SUITE"]

_KINDS = ("send", "return")


def _across(devices: int, op: Callable[..., Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Runs the op on each device's rows and group sizes, [devices, ...], and stacks the results."""
    found = jax.devices()
    if len(found) % devices:
        raise unittest.SkipTest(f"needs {devices} devices, or a multiple; JAX has {len(found)}")
    mesh = Mesh(np.array(found[:devices]), (options["axis_name"],), axis_types=(AxisType.Auto,))
    spec = P(options["axis_name"])
    return jax.shard_map(
        lambda x, group_sizes: op(x[0], group_sizes[0], **options)[None],
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
    )(arrays["x"], arrays["group_sizes"])


def _case(
    name: str, kind: str, devices: int, *, rows: int, buffer: int, counted: int | None = None, width: int = 3
) -> OpCase:
    """Builds a case with two groups per device; the first `counted` rows (default: all) of a device are in groups."""

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        groups, total = 2 * devices, rows if counted is None else counted
        sizes = rng.multinomial(total, rng.dirichlet(np.full(groups, 0.5)), size=devices).astype(np.int32)
        return {"x": rng.normal(size=(devices, rows if kind == "send" else buffer, width)), "group_sizes": sizes}

    out_rows = buffer if kind == "send" else rows
    options = {"axis_name": "expert", "kind": kind, "out_rows": out_rows}
    return OpCase(
        "exchange", f"{kind}_{name}_over_{devices}", arrays, options, call=functools.partial(_across, devices)
    )


_CASES = tuple(
    case
    for kind in _KINDS
    for case in (
        *(_case("all", kind, devices, rows=7, buffer=7 * devices) for devices in (1, 2, 4, 8)),
        *(_case("cut_off", kind, devices, rows=9, buffer=6) for devices in (1, 2, 8)),
        _case("rows_of_no_group", kind, 2, rows=9, buffer=11, counted=5),
        _case("more_in_groups_than_rows", kind, 2, rows=3, buffer=11, counted=5),
        _case("empty_rows", kind, 2, rows=1, buffer=3, counted=0),
    )
)

_FOR_ACCELERATORS = in_tiles(
    *(
        case
        for kind in _KINDS
        for case in (
            _case("wide_rows", kind, 1, rows=64, buffer=64, width=128),
            _case("wide_rows_cut_off", kind, 1, rows=67, buffer=40, width=128),
            _case("wide_rows_of_no_group", kind, 1, rows=64, buffer=100, counted=50, width=256),
            _case("no_wide_rows", kind, 1, rows=64, buffer=32, counted=0, width=128),
        )
    )
)


def _oracle(x: Any, group_sizes: Any, *, axis_name: str, kind: str, out_rows: int) -> Any:
    """Moves each row to its destination; "return" moves rows in the opposite direction."""
    del axis_name
    devices = len(x)
    rows, buffer = (x.shape[1], out_rows) if kind == "send" else (out_rows, x.shape[1])
    journeys = _journeys(np.asarray(group_sizes), rows, buffer)
    sender, row, receiver, place = np.array(journeys, np.int32).reshape(-1, 4).T
    moved = jnp.zeros((devices, out_rows, x.shape[2]))
    if kind == "send":
        return moved.at[receiver, place].set(x[sender, row])
    return moved.at[sender, row].set(x[receiver, place])


def _journeys(group_sizes: np.ndarray, rows: int, buffer: int) -> list[tuple[int, int, int, int]]:
    """Returns (sender, row there, receiver, row there) of every row that arrives."""
    devices, groups = group_sizes.shape
    journeys: list[tuple[int, int, int, int]] = []
    for receiver in range(devices):
        own = range(receiver * groups // devices, (receiver + 1) * groups // devices)
        coming = [
            (sender, int(group_sizes[sender, :group].sum()) + index)
            for group in own
            for sender in range(devices)
            for index in range(group_sizes[sender, group])
        ]
        journeys += [
            (sender, row, receiver, place) for place, (sender, row) in enumerate(coming[:buffer]) if row < rows
        ]
    return journeys


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
