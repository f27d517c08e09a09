"""Samples from captures: times of each operation and of the entire step, in every step."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stack_profile.comparisons.matching import Site, sites
from stack_profile.errors import ProfileError
from stack_profile.traces.operations import PICOSECOND, Operation, Ops, Step
from stack_profile.traces.trace import Trace

__all__ = ["Samples", "Side", "samples_of"]


@dataclass(frozen=True)
class Samples:
    """Steps of one capture, averaged over devices.

    Attributes:
      operations: distinct operations on all devices, in the order of their programs.
      self_s: self times [step, operation]; the sum of a row is the step's busy time.
      step_s: [step], from the start of one step to the start of the next.
      outside_s: busy time outside of any step.
    """

    operations: tuple[Operation, ...]
    self_s: np.ndarray
    step_s: np.ndarray
    outside_s: float

    def __len__(self) -> int:
        return len(self.step_s)


@dataclass(frozen=True)
class Side:
    """Captures of one program.

    Attributes:
      sites, operations: identity and operation of each column, in the order of the programs.
      self_s: self times [step, operation] of each capture.
      step_s: step times [step] of each capture.
      outside_s: busy time outside of any step, in all captures together.
    """

    sites: tuple[Site, ...]
    operations: tuple[Operation, ...]
    self_s: tuple[np.ndarray, ...]
    step_s: tuple[np.ndarray, ...]
    outside_s: float

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Side | None":
        """Collects the samples of captures, or returns None for a trace without distinguishable steps.

        Raises:
          ProfileError: `traces` is empty.
        """
        if not traces:
            raise ProfileError("A side of the comparison has no captures; name one at least.")
        captures = [samples for trace in traces if (samples := samples_of(trace)) is not None]
        if len(captures) < len(traces):
            return None
        columns: dict[Site, int] = {}
        operations: dict[Site, Operation] = {}
        places: list[list[int]] = []
        for samples in captures:
            found = sites(samples.operations)
            # The first capture's operation describes a site that several captures share.
            operations = {**dict(zip(found, samples.operations, strict=True)), **operations}
            places.append([columns.setdefault(site, len(columns)) for site in found])
        self_s = []
        for samples, place in zip(captures, places, strict=True):
            self_s.append(np.zeros((len(samples), len(columns))))
            self_s[-1][:, place] = samples.self_s
        step_s = tuple(samples.step_s for samples in captures)
        outside_s = sum(samples.outside_s for samples in captures)
        return cls(tuple(columns), tuple(operations[site] for site in columns), tuple(self_s), step_s, outside_s)

    def evened(self, columns: Sequence[int]) -> "Side":
        """Divides out each step's common slowdown, estimated by the median over some columns."""
        even = []
        for samples in self.self_s:
            typical = np.median(samples, axis=0)
            peers = [column for column in columns if typical[column] > 0]
            pace = np.median(samples[:, peers] / typical[peers], axis=1) if peers else np.ones(len(samples))
            # A step in which the median column did not run keeps its times.
            even.append(samples / np.where(pace > 0, pace, 1.0)[:, None])
        return dataclasses.replace(self, self_s=tuple(even))

    def sums(self, groups: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns the seconds of groups of columns, [step, group] for each capture."""
        return [
            np.array([samples[:, list(members)].sum(axis=1) for members in groups]).reshape(len(groups), len(samples)).T
            for samples in self.self_s
        ]


def samples_of(trace: Trace) -> Samples | None:
    """Returns the samples of a capture, or None for a trace without distinguishable steps.

    The last step is omitted unless it is the only one: it ends with its last operation, other steps with the next
    step's start.
    """
    devices = [(ops, steps[:-1] or steps) for ops in trace.devices if (steps := trace.steps[ops.device])]
    if not devices:
        return None
    columns: dict[tuple[str, int, str], int] = {}
    operations: list[Operation] = []
    for ops, _ in devices:
        for operation in ops.operations:
            # Equal for a new key only.
            if columns.setdefault(_key(operation), len(columns)) == len(operations):
                operations.append(operation)
    # A capture may end between the steps of two devices.
    count = min(len(steps) for _, steps in devices)
    self_s = np.mean([_self_s(ops, steps[:count], columns) for ops, steps in devices], axis=0)
    step_s = np.mean([[step.duration_ps * PICOSECOND for step in steps[:count]] for _, steps in devices], axis=0)
    busy_s = sum(ops.busy_s for ops, _ in devices) / len(devices)
    # Operations that ran only between the steps are omitted.
    order = [column for column in _program_order(operations) if self_s[:, column].any()]
    kept = tuple(operations[column] for column in order)
    return Samples(kept, self_s[:, order], step_s, busy_s - float(self_s.sum()))


def _key(operation: Operation) -> tuple[str, int, str]:
    return *operation.owner, operation.name


def _program_order(operations: Sequence[Operation]) -> list[int]:
    places = {
        id(program): {name: place for place, name in enumerate(program.instructions)}
        for operation in operations
        if (program := operation.program) is not None
    }

    def position(column: int) -> tuple[int, str, int, str]:
        operation = operations[column]
        place = places.get(id(operation.program), {}).get(operation.name.removeprefix("%"), -1)
        return operation.program_key, operation.module, place, operation.name

    return sorted(range(len(operations)), key=position)


def _self_s(ops: Ops, steps: Sequence[Step], columns: Mapping[tuple[str, int, str], int]) -> np.ndarray:
    """Returns the seconds of each operation in each step, [step, column]."""
    step = _steps_of_rows(ops, steps)
    inside = np.flatnonzero(step >= 0)
    column = np.array([columns[_key(operation)] for operation in ops.operations])[ops.which[inside]]
    place = step[inside] * len(columns) + column
    sums = np.bincount(place, ops.self_ps[inside] * PICOSECOND, minlength=len(steps) * len(columns))
    return sums.reshape(len(steps), len(columns))


def _steps_of_rows(ops: Ops, steps: Sequence[Step]) -> np.ndarray:
    """Returns the step of each execution, by its run; by its start for other programs; -1 outside of steps."""
    starts, ends = (np.array([getattr(step, name) for step in steps]) for name in ("start_ps", "end_ps"))
    place = np.searchsorted(starts, ops.start_ps, "right") - 1
    place = np.where(ops.start_ps < ends[place], place, -1)
    runs = np.array([step.run for step in steps])
    order = np.argsort(runs)
    found = order[np.searchsorted(runs[order], ops.run).clip(max=len(runs) - 1)]
    # A run may end after the next step has begun, so its executions belong to the step of the run.
    own = np.array([operation.module == steps[0].program for operation in ops.operations], bool)[ops.which]
    return np.where(own & (runs[found] == ops.run), found, place)
