"""Collectives of a trace: their executions, bytes, groups of devices, exposed time and waiting time."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stack_profile.errors import ProfileError
from stack_profile.traces.hlo import Program
from stack_profile.traces.intervals import self_times
from stack_profile.traces.operations import PICOSECOND, Operation, Ops

if TYPE_CHECKING:
    from stack_core.programs.hlo_costs import Collective

__all__ = ["Axes", "Collectives", "Kind", "Wait", "collectives_of", "event_waits_of", "waits_of"]


@dataclass(frozen=True)
class Axes:
    """The mesh of a trace, if known; device numbers increase fastest along the last axis.

    Attributes:
      devices: number of devices.
      sizes: size of each axis in order; empty if unknown.
      processes: process of each device in the order of the mesh; empty if unknown.
    """

    devices: int
    sizes: Mapping[str, int]
    processes: tuple[int, ...] = ()

    @classmethod
    def of(cls, about: Mapping[str, Any], captured: int, spec: str | None = None) -> "Axes":
        """Returns the mesh given as "fsdp=4,tensor=2", otherwise the capture's mesh.

        Args:
          about: metadata of the capture.
          captured: number of devices in the trace, for captures without metadata.
          spec: axes and their sizes.

        Raises:
          ProfileError: `spec` is malformed, or its size is not the number of devices.
        """
        devices = int(about.get("devices", captured))
        if spec is None:
            meshes: Sequence[dict[str, int]] = about.get("meshes", ())
            processes = about.get("mesh_processes", [()] * len(meshes))
            for sizes, each in zip(meshes, processes, strict=False):
                if math.prod(sizes.values()) == devices:
                    return cls(devices, sizes, tuple(each))
            return cls(devices, {})
        if re.fullmatch(r"\w+=\d+(,\w+=\d+)*", spec) is None:
            raise ProfileError(f"The mesh {spec!r} is not of the form fsdp=4,tensor=2: name every axis and its size.")
        sizes = {name: int(size) for name, size in (axis.split("=") for axis in spec.split(","))}
        if math.prod(sizes.values()) != devices:
            raise ProfileError(
                f"The mesh {spec!r} has {math.prod(sizes.values())} devices, the trace {devices}; name all its axes."
            )
        return cls(devices, sizes)

    def spanned(self, group: Sequence[int]) -> str:
        """Returns the axes along which a group's devices differ; without a mesh, text such as "4 devices, 2 apart"."""
        if self.sizes and max(group) < self.devices:
            places = np.unravel_index(np.array(group), tuple(self.sizes.values()))
            return ", ".join(name for name, place in zip(self.sizes, places, strict=True) if len(set(place)) > 1)
        steps = set(np.diff(sorted(group)).tolist())
        return f"{len(group)} devices" + (f", {steps.pop()} apart" if len(steps) == 1 else "")


@dataclass(frozen=True)
class Kind:
    """Properties of a collective operation, from its program or only from its name.

    Attributes:
      name: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", ...
      axis: see `Axes.spanned`; "" without the program.
      array_bytes, sent_bytes: bytes of one execution on one device, see `stack_core.programs.hlo_costs.Collective`.
      start: for a done operation, the name of its start operation; otherwise "".
      groups: groups of positions in the program's list of devices, for a permutation pairs of source and target; empty
        without the program and between TPU slices.
      between_slices: True if the collective connects TPU slices.
    """

    name: str
    axis: str = ""
    array_bytes: int | None = None
    sent_bytes: float | None = None
    start: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    between_slices: bool = False


@dataclass(frozen=True)
class Collectives:
    """Executions of one collective on one device, one per row, in order of their start.

    Attributes:
      operation: the collective, or the start operation of an asynchronous one.
      kind: properties of the collective.
      start_ps, end_ps: an asynchronous collective lasts from its start operation's start to its done operation's end.
      run: execution of the program that each row is in.
      exposed_ps: time in which the device runs nothing but collectives, shared between concurrent collectives.
    """

    operation: Operation
    kind: Kind
    start_ps: np.ndarray
    end_ps: np.ndarray
    run: np.ndarray
    exposed_ps: np.ndarray

    @property
    def identity(self) -> tuple[str, int, str]:
        """Key that the same collective has on all devices."""
        return *self.operation.owner, self.operation.name

    @property
    def duration_ps(self) -> np.ndarray:
        return self.end_ps - self.start_ps


@dataclass(frozen=True)
class Wait:
    """Waiting time in the executions that all devices have in common.

    Attributes:
      count: number of executions.
      time_s: their total time on the device.
      wait_s: part of `time_s` spent waiting for the last device.
    """

    count: int
    time_s: float
    wait_s: float


def collectives_of(devices: Sequence[Ops], axes: Axes) -> Mapping[str, tuple[Collectives, ...]]:
    """Returns the collectives of each device by the device's name."""
    programs = {id(operation.program): operation.program for each in devices for operation in each.operations}
    kinds = {key: _kinds(program, axes) for key, program in programs.items() if program is not None}
    return {each.device: _collectives(each, kinds) for each in devices}


def waits_of(found: Mapping[str, Sequence[Collectives]]) -> Mapping[str, Mapping[tuple[str, int, str], Wait]]:
    """Computes each device's waiting time in each collective, for collectives that several devices have in common.

    The device that arrives last does not wait, so the shortest time is the duration without waiting.
    """
    waits: dict[str, dict[tuple[str, int, str], Wait]] = {device: {} for device in found}
    by_event = event_waits_of(found)
    for device, collectives in found.items():
        for each in collectives:
            wait_of_each = by_event[device][each.identity]
            known = np.flatnonzero(wait_of_each >= 0)
            if len(known):
                wait_ps = int(wait_of_each[known].sum())
                time_ps = int(each.duration_ps[known].sum())
                waits[device][each.identity] = Wait(len(known), time_ps * PICOSECOND, wait_ps * PICOSECOND)
    return waits


def event_waits_of(
    found: Mapping[str, Sequence[Collectives]],
) -> Mapping[str, Mapping[tuple[str, int, str], np.ndarray]]:
    """Computes the waiting time of each execution in picoseconds; -1 if other devices do not have the execution."""
    together: dict[tuple[str, int, str], dict[str, Collectives]] = {}
    for device, collectives in found.items():
        for each in collectives:
            together.setdefault(each.identity, {})[device] = each
    waits: dict[str, dict[tuple[str, int, str], np.ndarray]] = {device: {} for device in found}
    for identity, members in together.items():
        kept = _aligned(list(members.values()))
        durations = np.stack([each.duration_ps[rows] for each, rows in zip(members.values(), kept, strict=True)])
        is_known = len(members) > 1 and durations.shape[1] > 0
        for place, (device, each) in enumerate(members.items()):
            waits[device][identity] = np.full(len(each.start_ps), -1, np.int64)
            if is_known:
                waits[device][identity][kept[place]] = durations[place] - durations.min(axis=0)
    return waits


_KINDS: Final = (
    "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
)
_NAME: Final = re.compile(rf"({_KINDS})(-start|-done)?(\.[\w.]+)?")


def _kinds(program: Program, axes: Axes) -> Mapping[str, Kind] | None:
    """Returns a program's collectives by the names under which they run, or None for an unreadable program."""
    from stack_core.programs.hlo_costs import collectives  # imports jax

    if program.module is None:
        return None
    kinds = {each.runner: _kind(each, axes) for each in collectives(program.module, max(axes.devices, 1))}
    for computation in program.module.computations.values():
        for start in kinds.keys() & computation.instructions.keys():
            users = list(computation.users[start])
            # Some backends put updates between start and done, and the done operation reads the last update.
            users += [end for user in users if user.opcode.endswith("-update") for end in computation.users[user.name]]
            for user in users:
                if user.opcode.endswith("-done"):
                    kinds[user.name] = dataclasses.replace(kinds[start], start=start)
    return kinds


def _kind(collective: "Collective", axes: Axes) -> Kind:
    return Kind(
        collective.kind,
        axes.spanned(collective.group),
        collective.array_bytes,
        collective.sent_bytes,
        groups=collective.groups,
        between_slices=collective.between_slices,
    )


def _kind_of(operation: Operation, kinds: Mapping[int, Mapping[str, Kind] | None]) -> Kind | None:
    """Returns an operation's properties as a collective, or None for other operations."""
    name = operation.name.removeprefix("%")
    if (known := kinds.get(id(operation.program))) is not None:
        return known.get(name)
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    # Without the program, names are all there is: XLA gives start and done the same suffix.
    return Kind(match[1], start=f"{match[1]}-start{match[3] or ''}" if match[2] == "-done" else "")


def _collectives(ops: Ops, kinds: Mapping[int, Mapping[str, Kind] | None]) -> tuple[Collectives, ...]:
    found = {row: kind for row, each in enumerate(ops.operations) if (kind := _kind_of(each, kinds)) is not None}
    rows = {(ops.operations[row].owner, ops.operations[row].name.removeprefix("%")): row for row in found}
    dones: dict[int, int] = {}
    for row, kind in found.items():
        start = rows.get((ops.operations[row].owner, kind.start)) if kind.start else None
        if start is not None:
            dones[start] = row
    wholes = [row for row in found if row not in dones.values()]
    spans = [_span(ops, row, dones.get(row)) for row in wholes]
    exposed = _exposed(ops, found.keys(), spans)
    return tuple(
        Collectives(ops.operations[row], found[row], *span, part)
        for row, span, part in zip(wholes, spans, exposed, strict=True)
    )


def _span(ops: Ops, start: int, end_op: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns start, end and run of each execution; a done operation ends the latest earlier start."""
    rows = np.flatnonzero(ops.which == start)
    starts, ends = ops.start_ps[rows], ops.end_ps[rows]
    if end_op is not None:
        last = np.flatnonzero(ops.which == end_op)
        place = np.searchsorted(starts, ops.start_ps[last], "right") - 1
        # `at` also handles several done events of one start.
        np.maximum.at(ends, place[place >= 0], ops.end_ps[last[place >= 0]])
    return starts, ends, ops.run[rows]


def _exposed(
    ops: Ops, collectives: Collection[int], spans: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """Computes the exposed time of each execution; self times give instants to concurrent other operations first."""
    if not spans:
        return []
    # Loops contain other operations, so their events are not work by themselves.
    outer = [each.is_container or each.beside for each in ops.operations]
    is_other = [not (each or row in collectives) for row, each in enumerate(outer)]
    others = np.flatnonzero(np.array(is_other)[ops.which])
    starts = np.concatenate([ops.start_ps[others], *(start for start, _, _ in spans)])
    ends = np.concatenate([ops.end_ps[others], *(end for _, end, _ in spans)])
    depth = np.where(np.arange(len(starts)) < len(others), -1, 0)
    counts = [len(start) for start, _, _ in spans]
    return np.split(self_times(starts, ends, depth)[len(others) :], np.cumsum(counts)[:-1])


def _aligned(found: Sequence[Collectives]) -> list[np.ndarray]:
    """Returns each device's executions in the runs in which all devices have the same number of them, in one order."""
    counts = []
    for each in found:
        runs, executions = np.unique(each.run, return_counts=True)
        counts.append(dict(zip(runs.tolist(), executions.tolist(), strict=True)))
    # A run that the capture cut off has fewer executions on some device.
    common = [run for run, count in counts[0].items() if all(each.get(run) == count for each in counts)]
    rows = []
    for each in found:
        kept = np.flatnonzero(np.isin(each.run, common))
        rows.append(kept[np.argsort(each.run[kept], kind="stable")])
    return rows
