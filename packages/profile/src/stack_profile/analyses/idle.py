"""Idle time of devices between operations, by cause and by line of the preceding operation.

A GPU works on kernels as the host launches them. Gaps show where the host is late: it reads the condition of a loop,
launches the next kernels or CUDA graph, or runs Python between programs.
"""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_core.report.plots import bars
from stack_profile.analyses.ops import chosen_devices
from stack_profile.analyses.overview import activity_of
from stack_profile.answer import Answer
from stack_profile.traces.categories import HOST_COPY, category_of
from stack_profile.traces.instructions import CONTAINERS
from stack_profile.traces.intervals import gaps
from stack_profile.traces.operations import PICOSECOND, Operation, Ops
from stack_profile.traces.trace import Trace

__all__ = ["IdleRow", "idle"]


@dataclass(frozen=True)
class IdleRow:
    """Idle time of one cause after operations of one line.

    Attributes:
      cause: "condition read by the host" after a loop's or branch's condition was copied to the host, "between
        programs" or copies of the host, "between runs" of one program, or "between operations" of one run.
      line: line of the operation before the gap; "" if unknown.
      gaps: number of gaps.
      idle_s: total idle time.
      idle_window_share: `idle_s` as a share of `window_s`.
      median_gap_s: median length of a gap.
      before, after: operations around the longest gap.
      host: the host's activity in the longest gap; None without events of the host.
      host_line: Python line in most samples of the thread that calls JAX during these gaps; "" without samples.
      samples: number of these samples.
      host_line_samples_share: share of `samples` that have the line; None without samples.
    """

    cause: str
    line: str
    gaps: int
    idle_s: float
    idle_window_share: float
    median_gap_s: float
    before: str
    after: str
    host: str | None
    host_line: str
    samples: int
    host_line_samples_share: float | None


def idle(trace: Trace, *, device: str | None = None) -> Answer[IdleRow]:
    """Show why devices were idle between operations.

    Args:
      device: one device instead of all of them together.

    Raises:
      UnknownName: the trace does not have the device.
    """
    devices = chosen_devices(trace, device)
    found: dict[tuple[str, str], list[_Gap]] = {}
    for each in devices:
        for gap in _gaps(each, *_window(trace, each)):
            found.setdefault((gap.cause, gap.line), []).append(gap)
    window_s = sum((end - start for start, end in (_window(trace, each) for each in devices)), 0) * PICOSECOND
    rows = tuple(sorted((_row(*key, each, window_s, trace) for key, each in found.items()), key=_size))
    return Answer(
        name="idle",
        facts=_totals(len(devices), rows, window_s),
        row_type=IdleRow,
        rows=rows,
        notes=(*_notes(devices, rows), *trace.problems),
        plots=(bars("Idle time by cause", rows, "idle_s", label="cause"),) if rows else (),
    )


@dataclass(frozen=True)
class _Gap:
    cause: str
    line: str
    start_ps: int
    end_ps: int
    before: Operation
    after: Operation
    device: str


def _window(trace: Trace, ops: Ops) -> tuple[int, int]:
    """Returns start and end of a device's steps; without steps, of its operations."""
    steps = trace.steps[ops.device]
    return (steps[0].start_ps, steps[-1].end_ps) if steps else (int(ops.covered[0, 0]), int(ops.covered[-1, 1]))


def _gaps(ops: Ops, start_ps: int, end_ps: int) -> Iterator[_Gap]:
    free = gaps(ops.covered, start_ps, end_ps)
    by_end = np.argsort(ops.end_ps, kind="stable")
    # A gap begins with the end of an operation and ends with the start of one; the edges of the window may not.
    last = np.searchsorted(ops.end_ps[by_end], free[:, 0], "right") - 1
    following = np.searchsorted(ops.start_ps, free[:, 1], "left")
    for (start, end), place, after in zip(free.tolist(), last.tolist(), following.tolist(), strict=True):
        if place < 0 or after >= len(ops):
            continue
        before = int(by_end[place])
        first, second = ops.operations[int(ops.which[before])], ops.operations[int(ops.which[after])]
        instruction = first.instruction
        if instruction is not None and instruction.opcode in CONTAINERS and category_of(first) == HOST_COPY:
            cause = "condition read by the host"
        elif first.beside or second.beside or first.owner != second.owner:
            cause = "between programs"
        else:
            cause = "between operations" if ops.run[before] == ops.run[after] else "between runs"
        source = instruction.source() if instruction else None
        yield _Gap(cause, str(source) if source else "", start, end, first, second, ops.device)


def _row(cause: str, line: str, found: Sequence[_Gap], window_s: float, trace: Trace) -> IdleRow:
    lines: collections.Counter[str] = collections.Counter()
    for each in trace.calling_samples:
        own = [(gap.start_ps, gap.end_ps) for gap in found if gap.device.startswith(each.prefix)]
        lines.update(each.lines(np.array(own, np.int64).reshape(-1, 2)))
    host_line, count = next(iter(lines.most_common(1)), ("", 0))
    sizes = [gap.end_ps - gap.start_ps for gap in found]
    longest = max(found, key=lambda gap: gap.end_ps - gap.start_ps)
    return IdleRow(
        cause=cause,
        line=line,
        gaps=len(found),
        idle_s=sum(sizes) * PICOSECOND,
        idle_window_share=sum(sizes) * PICOSECOND / window_s,
        median_gap_s=float(np.median(sizes)) * PICOSECOND,
        before=longest.before.name,
        after=longest.after.name,
        host=activity_of(trace.host_events, longest.start_ps, longest.end_ps),
        host_line=host_line,
        samples=lines.total(),
        host_line_samples_share=count / lines.total() if count else None,
    )


def _size(row: IdleRow) -> float:
    return -row.idle_s


def _totals(devices: int, rows: Sequence[IdleRow], window_s: float) -> dict[str, Any]:
    idle_s = sum((row.idle_s for row in rows), 0.0) if devices else None
    return {
        "devices": devices,
        "window_s": window_s if devices else None,
        "idle_s": idle_s,
        "idle_window_share": idle_s / window_s if idle_s is not None and window_s else None,
        "gaps": sum(row.gaps for row in rows) if devices else None,
    }


def _notes(devices: Sequence[Ops], rows: Sequence[IdleRow]) -> Iterator[str]:
    if not devices:
        yield "No data: the trace has no operations of any device."
        return
    yield "From the first step to the last, summed over devices. A row is named by the operation before its gaps."
    if any(row.host_line for row in rows):
        yield "The host's line is the most frequent one of the sampled Python stacks during the gaps."
