"""Peak memory of a program by array, layer, kind or Python line.

XLA's buffer assignment is replayed along its schedule. The peak consists of arguments, outputs and constants, which
exist throughout, and of the temporaries live at that moment. Scratch memory that libraries allocate at run time is not
part of the assignment and is not counted; a note names the operations that may use such libraries.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from stack_core.abi.errors import UnknownName, nearest
from stack_core.report.fields import number
from stack_core.report.plots import Bars, Chart, Series, bars
from stack_profile.answer import Answer
from stack_profile.errors import TraceError
from stack_profile.traces.buffers import Allocation, Assignment, read_buffers
from stack_profile.traces.hlo import Program
from stack_profile.traces.instructions import Instruction
from stack_profile.traces.trace import Trace

__all__ = ["MemoryGrouping", "MemoryRow", "MomentRow", "memory", "memory_of", "schedule_of", "total_bytes_of"]

MemoryGrouping = Literal["buffer", "layer", "line", "kind"]


@dataclass(frozen=True)
class MemoryRow:
    """Arrays that are live at the peak.

    Attributes:
      name: name of the argument, instruction or group.
      kind: "argument", "donated argument", "output", "constant", "temporary", or "unused" for gaps between temporaries.
      size_bytes: total size of the buffers.
      total_share: `size_bytes` as a share of the program's `total_bytes`.
      buffers: number of buffers.
      layer, line: layer and Python line; "" if unknown or if the group has several.
    """

    name: str
    kind: str
    size_bytes: int
    total_share: float | None
    buffers: int
    layer: str
    line: str


@dataclass(frozen=True)
class MomentRow:
    """Live temporaries after an instruction allocated or freed memory.

    Attributes:
      position: index of the moment in the schedule.
      instruction: instruction that allocated or freed memory.
      live_bytes: size of the live temporaries.
      layer, line: layer and Python line of the instruction; "" if unknown.
    """

    position: int
    instruction: str
    live_bytes: int
    layer: str
    line: str


def memory(
    trace: Trace, *, by: MemoryGrouping | Literal["schedule"] = "buffer", program: str | None = None
) -> "Answer[MemoryRow] | Answer[MomentRow]":
    """Show what makes up the peak of a program's memory.

    Args:
      by: grouping of the arrays, or the schedule along which temporaries are allocated and freed.
      program: module name, such as jit_step; by default the program that took the most time, or the most memory if
        nothing ran.

    Raises:
      UnknownName: the trace does not have the program.
      TraceError: the program's buffers are damaged.
    """
    chosen = _chosen(trace, program)
    if chosen is None:
        notes = ("No data: the trace holds the HLO of no program.", *trace.problems)
        return Answer(f"memory by {by}", {}, MemoryRow, (), notes)
    answer = schedule_of(chosen) if by == "schedule" else memory_of(chosen, by=by)
    return dataclasses.replace(answer, notes=(*answer.notes, *trace.problems))


def memory_of(program: Program, *, by: MemoryGrouping = "buffer") -> Answer[MemoryRow]:
    """Reports the peak memory of a compiled program (`stack_profile.traces.hlo.program_of`); nothing runs."""
    assignment = read_buffers(program)
    if assignment is None:
        note = f"No data: the HLO of {program.name} comes without its buffers. Capture where it is compiled."
        return Answer(f"memory by {by}", {"program": program.name}, MemoryRow, (), (note,))
    arrays = list(_at_peak(program, assignment))
    rows = arrays if by == "buffer" else list(_grouped(arrays, by))
    return Answer(
        name=f"memory by {by}",
        facts=_totals(program, assignment),
        row_type=MemoryRow,
        rows=tuple(sorted(rows, key=lambda row: -row.size_bytes)),
        notes=tuple(_notes(program, assignment)),
        plots=(
            *_charts(assignment),
            *(_bars(f"At the peak, by {each}", _grouped(arrays, each)) for each in ("kind", "layer")),
        ),
    )


def total_bytes_of(program: Program) -> int:
    """Returns the memory of one device while a program runs; 0 if its buffers are unknown or damaged."""
    try:
        assignment = read_buffers(program)
    except TraceError:
        return 0
    return assignment.total_bytes if assignment else 0


def schedule_of(program: Program) -> Answer[MomentRow]:
    """Reports the live temporaries of a compiled program along its schedule."""
    assignment = read_buffers(program)
    rows: list[MomentRow] = []
    for each in assignment.schedules if assignment else ():
        for moment in each.moments():
            layer, line = _place(program.instructions.get(moment.instruction))
            rows.append(MomentRow(len(rows), moment.instruction, moment.live_bytes, layer, line))
    notes = () if rows else ("No data: XLA kept no schedule of this program's temporaries.",)
    plots = tuple(_charts(assignment)) if assignment else ()
    return Answer("memory by schedule", {"program": program.name}, MomentRow, tuple(rows), notes, plots)


def _charts(assignment: Assignment) -> Iterator[Chart]:
    """Plots the live temporaries along the schedule and marks their peak."""
    moments = [moment for each in assignment.schedules for moment in each.moments()]
    if moments:
        points = [(float(position), float(moment.live_bytes)) for position, moment in enumerate(moments)]
        top = max(points, key=lambda point: point[1])
        peak = Series("peak", "dots", [top], [moments[int(top[0])].instruction])
        yield Chart("Temporaries over the schedule", "position", "live_bytes", [Series("live", "area", points), peak])


def _bars(title: str, rows: Iterable[MemoryRow]) -> Bars:
    return bars(title, sorted(rows, key=lambda row: -row.size_bytes), "size_bytes")


# Opcodes that a backend may implement by a library, which allocates scratch memory without XLA.
_LIBRARIES: Final = ("custom-call", "dot", "convolution", "sort", "fft", "cholesky", "triangular-solve")


def _chosen(trace: Trace, name: str | None) -> Program | None:
    if name is not None:
        found = [program for program in trace.programs if program.name == name]
        if not found:
            known = sorted({program.name for program in trace.programs})
            raise UnknownName(
                f"The trace holds no program {name!r}.{nearest(name, known)} There are: {', '.join(known) or 'none'}."
            )
        return max(found, key=lambda program: len(program.proto))
    if not trace.devices:
        return max(trace.programs, key=lambda program: (total_bytes_of(program), len(program.proto)), default=None)
    took: dict[int, float] = collections.defaultdict(float)
    for ops in trace.devices:
        for operation, self_s, _ in ops.totals():
            took[id(operation.program)] += self_s
    # Programs of equal times, by their size.
    return max(trace.programs, key=lambda program: (took[id(program)], len(program.proto)), default=None)


def _at_peak(program: Program, assignment: Assignment) -> Iterator[MemoryRow]:
    total = assignment.total_bytes
    replayed: set[int] = set()
    for each in assignment.schedules:
        arena = each.allocation(assignment.allocations)
        if arena is None:
            continue
        # Listed buffer by buffer here, so the loop below skips this allocation.
        replayed.add(arena.index)
        peak = each.peak()
        for key in peak.live:
            buffer = assignment.buffers[key]
            instruction = program.instructions.get(buffer.instruction)
            yield _row(buffer.instruction, "temporary", buffer.size_bytes, total, instruction)
        # Alignment and fragmentation leave gaps; with these the rows sum to the total.
        if unused := arena.size_bytes - peak.live_bytes:
            yield _row("between temporaries", "unused", unused, total, None)
    for allocation in assignment.allocations:
        if allocation.index not in replayed:
            instruction = _maker(program, assignment, allocation)
            name = "" if instruction is None else instruction.name
            if instruction is not None and instruction.opcode == "parameter" and instruction.argument:
                # JAX's name of an argument is more useful than "parameter.3".
                name = instruction.argument
            yield _row(name, allocation.kind, allocation.size_bytes, total, instruction)


def _maker(program: Program, assignment: Assignment, allocation: Allocation) -> Instruction | None:
    """Returns the argument in an allocation, otherwise the first instruction that writes there."""
    names = [assignment.buffers[key].instruction for key in allocation.buffers if key in assignment.buffers]
    found = [program.instructions[name] for name in names if name in program.instructions]
    # A donated argument shares its allocation with an output; the argument has the more useful name.
    return next((each for each in found if each.opcode == "parameter"), found[0] if found else None)


def _row(name: str, kind: str, size_bytes: int, total: int, instruction: Instruction | None) -> MemoryRow:
    return MemoryRow(name, kind, size_bytes, size_bytes / total if total else None, 1, *_place(instruction))


def _place(instruction: Instruction | None) -> tuple[str, str]:
    """Returns the layer and the line of an instruction."""
    if instruction is None:
        return "", ""
    return instruction.layer, str(instruction.source() or "")


def _grouped(rows: Sequence[MemoryRow], by: MemoryGrouping) -> Iterator[MemoryRow]:
    groups: dict[str, list[MemoryRow]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by), []).append(row)
    for name, members in groups.items():
        kinds = sorted({row.kind for row in members})
        size = sum(row.size_bytes for row in members)
        shares = [row.total_share for row in members if row.total_share is not None]
        layers, lines = ({getattr(row, field) for row in members} for field in ("layer", "line"))
        layer, line = (found.pop() if len(found) == 1 else "" for found in (layers, lines))
        yield MemoryRow(name, ", ".join(kinds), size, sum(shares) if shares else None, len(members), layer, line)


def _totals(program: Program, assignment: Assignment) -> dict[str, Any]:
    peaks = [each.peak() for each in assignment.schedules]
    return {
        "program": program.name,
        "total_bytes": assignment.total_bytes,
        "argument_bytes": assignment.bytes_of("argument", "donated argument"),
        "output_bytes": assignment.bytes_of("output"),
        "constant_bytes": assignment.bytes_of("constant"),
        "temporary_bytes": assignment.bytes_of("temporary"),
        "peak_live_bytes": sum(peak.live_bytes for peak in peaks) if peaks else None,
        "peak_at": ", ".join(peak.instruction for peak in peaks if peak.instruction) or None,
        "elsewhere_bytes": assignment.elsewhere_bytes,
    }


def _notes(program: Program, assignment: Assignment) -> Iterator[str]:
    yield "Shares are fractions of one device's memory while the program runs (total); donated arguments hold outputs."
    if assignment.elsewhere_bytes:
        yield f"{number('_bytes', assignment.elsewhere_bytes)} are in other memory, a TPU's VMEM or the host's."
    if not assignment.schedules:
        yield "XLA stored no schedule of the temporaries: their lifetimes are unknown."
    # A fused instruction runs inside of its fusion, which is in the list.
    calls = [each for each in program.instructions.values() if not each.fused and each.opcodes & set(_LIBRARIES)]
    if calls:
        kinds = sorted({kind for each in calls for kind in each.opcodes & set(_LIBRARIES)})
        yield (
            f"{len(calls)} operations ({', '.join(kinds)}) may run library code, whose scratch memory XLA does not "
            "plan and which is in no number here."
        )
