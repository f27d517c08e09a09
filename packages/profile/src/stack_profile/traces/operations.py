"""Operations of a device: columns of executions, and a description of each operation."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from stack_profile.traces.hlo import Program
from stack_profile.traces.instructions import CONTAINERS, Instruction
from stack_profile.traces.intervals import tracks, union
from stack_profile.traces.xplane import MISSING

if TYPE_CHECKING:
    from stack_core.programs.hlo_costs import InstructionCost

__all__ = ["PICOSECOND", "HostEvents", "Operation", "Ops", "Step", "StepMarks", "steps_of"]

PICOSECOND: Final = 1e-12


@dataclass(frozen=True)
class Operation:
    """An instruction of a program, for all of its executions.

    Attributes:
      name: name of the instruction in events.
      module: name of the program in events.
      program_key: number of the program in events, which may come from the process that compiled it.
      program: program of the instruction, or None.
      instruction: the instruction, or None without the program or without a match in the program.
      beside: True for an operation without a program, such as a copy between host and GPU; it gets only the time in
        which no program's operations run.
      kernel: name of the kernel or copy on a GPU; "" on other devices.
      extra: True for all but the longest of several kernels of one instruction, whose cost counts once.
    """

    name: str
    module: str
    program_key: int
    program: Program | None = field(repr=False)
    instruction: Instruction | None
    beside: bool = False
    kernel: str = ""
    extra: bool = False

    @property
    def owner(self) -> tuple[str, int]:
        """Key of the program in its process."""
        return self.module, self.program_key

    @property
    def is_entry(self) -> bool:
        """True if the operation certainly runs outside of loops and calls, hence once per run of its program."""
        return (
            self.program is not None
            and self.instruction is not None
            and (self.instruction.computation == self.program.entry)
        )

    @property
    def opcode(self) -> str:
        # XLA names an instruction after its opcode and a number.
        return self.instruction.opcode if self.instruction else self.name.rstrip("0123456789").rstrip(".")

    @property
    def instruction_primitive(self) -> str:
        """JAX's name of the operation, such as "dot_general", or ""."""
        return self.instruction.scope.primitive if self.instruction else ""

    @property
    def is_container(self) -> bool:
        # A kernel or copy that a loop launches contains nothing.
        return not self.kernel and self.opcode in CONTAINERS

    @property
    def cost(self) -> "InstructionCost | None":
        """Cost of one execution; None for extra kernels, and if the program is unknown or unreadable."""
        if self.program is None or self.extra or not (costs := self.program.costs):
            return None
        name = self.name.removeprefix("%")
        return costs.get(name) or costs.get(self.program.async_starts.get(name, ""))

    @property
    def flops(self) -> int | None:
        """FLOPs of one execution; None if unknown, for example for custom calls."""
        cost = self.cost
        if cost is None:
            return None
        is_call = self.instruction is not None and "custom-call" in self.instruction.opcodes
        return None if is_call and cost.flops.total == 0 else cost.flops.total


@dataclass(frozen=True)
class Ops:
    """Executions of operations on one device, one per row, in order of their start.

    Attributes:
      device: name of the device.
      operations: the distinct operations.
      which: index of each row's operation in `operations`.
      start_ps, end_ps: times since the start of the trace. The end is that of the work; on CPUs, the event that started
        the work may end long before.
      self_ps: share of the row in the union of all rows, see `stack_profile.traces.intervals`.
      run: execution of the program that each row is in; `MISSING` if unknown.
    """

    device: str
    operations: tuple[Operation, ...]
    which: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    self_ps: np.ndarray
    run: np.ndarray

    def __len__(self) -> int:
        return len(self.which)

    @functools.cached_property
    def covered(self) -> np.ndarray:
        """Times in which any operation ran, as disjoint rows (start, end)."""
        return union(self.start_ps, self.end_ps)

    @functools.cached_property
    def tracks(self) -> np.ndarray:
        """A track for each row, without overlaps on a track: even for loops and calls, odd for other operations."""
        outer = np.array([operation.is_container for operation in self.operations], bool)[self.which]
        places = np.zeros(len(self), np.int64)
        for first, rows in enumerate((np.flatnonzero(outer), np.flatnonzero(~outer))):
            places[rows] = 2 * tracks(self.start_ps[rows], self.end_ps[rows]) + first
        return places

    @property
    def union_ps(self) -> int:
        return int(np.sum(self.covered[:, 1] - self.covered[:, 0]))

    @property
    def busy_s(self) -> float:
        """Time in which any operation ran."""
        return self.union_ps * PICOSECOND

    def totals(self) -> Iterator[tuple[Operation, float, int]]:
        """Yields each operation with the seconds of its self time and the number of its executions."""
        counts = np.bincount(self.which, minlength=len(self.operations))
        yield from zip(self.operations, (self.sums(self.self_ps) * PICOSECOND).tolist(), counts.tolist(), strict=True)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of a column for each operation."""
        return np.bincount(self.which, weights=values, minlength=len(self.operations))


@dataclass(frozen=True)
class Step:
    """One execution of the program with the most time on a device; the step lasts until the next execution starts.

    Attributes:
      number: the program's own number of the step if it annotates steps, otherwise counted from 1.
      program: name of the module.
      run: number of the execution.
      start_ps: start of the execution.
      end_ps: start of the next execution; the last step ends with its last operation.
    """

    number: int
    program: str
    run: int
    start_ps: int
    end_ps: int

    @property
    def duration_ps(self) -> int:
        return self.end_ps - self.start_ps


@dataclass(frozen=True)
class StepMarks:
    """Annotations of steps (`jax.profiler.StepTraceAnnotation`) in order of their start.

    Attributes:
      numbers: `step_num` of each annotation.
      start_ps: start of each annotation.
    """

    numbers: np.ndarray
    start_ps: np.ndarray

    def number(self, start_ps: np.ndarray, end_ps: int) -> np.ndarray:
        """Numbers steps on a device by the annotations on the host; from 1 if these do not fit.

        A step is dispatched within its annotation, and runs later, often while the host is in the next annotation. So
        the numbers are the largest consecutive ones for which no step starts before its annotation. They are unknown if
        the host runs ahead by more than a step: then the annotations are not as frequent as the steps.

        Args:
          start_ps: start of each step, ascending.
          end_ps: end of the last step.
        """
        places = np.arange(len(start_ps))
        inside = np.count_nonzero((self.start_ps >= start_ps[0]) & (self.start_ps < end_ps)) if len(places) else 0
        # A capture may cut off one annotation or one step at its ends.
        if not len(self.numbers) or (np.diff(self.numbers) != 1).any() or abs(inside - len(places)) > 1:
            return 1 + places
        latest = np.searchsorted(self.start_ps, start_ps, "right") - 1
        return places + np.min(self.numbers[0] + latest - places)


@dataclass(frozen=True)
class HostEvents:
    """Events on the hosts' threads, without operations of devices and the runtime's own marks.

    Attributes:
      names: the distinct names.
      which: index of each row's name in `names`.
      start_ps, end_ps: times since the base of the trace.
      jax_calls: rows that are calls of JAX; the remaining rows are the program's annotations.
    """

    names: tuple[str, ...]
    which: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    jax_calls: np.ndarray


def steps_of(ops: Ops, marks: StepMarks) -> tuple[Step, ...]:
    """Returns the steps of a device, without those that the capture cut off at its start or end."""
    rows = np.flatnonzero(ops.run != MISSING)
    if not len(rows):
        return ()
    owners: dict[tuple[str, int], int] = {}
    owner = np.array([owners.setdefault(each.owner, len(owners)) for each in ops.operations])[ops.which[rows]]
    # By time, because small programs may run more often than the step.
    rows = rows[owner == np.argmax(np.bincount(owner, weights=ops.self_ps[rows]))]
    runs, first, inverse, counts = np.unique(ops.run[rows], return_index=True, return_inverse=True, return_counts=True)
    starts = ops.start_ps[rows][first]
    ends = np.zeros(len(runs), np.int64)
    np.maximum.at(ends, inverse.reshape(-1), ops.end_ps[rows])
    order = np.argsort(starts)
    limits = np.append(starts[order][1:], ends[order][-1])
    # Only the first and the last run can be cut off by the capture.
    whole = counts[order] >= _WHOLE * np.median(counts)
    inner = np.arange(len(runs)).clip(1, len(runs) - 2) == np.arange(len(runs))
    name = ops.operations[int(ops.which[rows[0]])].module
    complete = np.flatnonzero(whole | inner)
    begins, ends = starts[order][complete], limits[complete]
    numbers = marks.number(begins, int(ends[-1]))
    columns = zip(numbers.tolist(), runs[order][complete].tolist(), begins.tolist(), ends.tolist(), strict=True)
    return tuple(Step(number, name, run, start, end) for number, run, start, end in columns)


_WHOLE: Final = 0.9  # a run with fewer operations than this share of the median was cut off by the capture
