"""Timeline of a step: its operations in order of time, grouped into spans of one layer each.

A span ends when the layer, the pass of training or the loop trip changes (`stack_profile.traces.spans`). Its name is
the layer with most of its time. Spans are contiguous: their durations sum to the window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stack_core.report.fields import number
from stack_core.report.plots import Lanes, Span
from stack_profile.analyses.ops import chosen_devices
from stack_profile.analyses.overview import activity_of
from stack_profile.answer import Answer
from stack_profile.errors import ProfileError
from stack_profile.traces.categories import category_of
from stack_profile.traces.operations import PICOSECOND, HostEvents, Ops, Step
from stack_profile.traces.spans import IDLE, Items, Key, cut, items_of
from stack_profile.traces.trace import Trace

__all__ = ["TimelineRow", "timeline"]


@dataclass(frozen=True)
class TimelineRow:
    """A span of a device's time.

    Attributes:
      start_s: time since the start of the window; spans are contiguous.
      duration_s: time until the next span starts; `self_s + idle_s`.
      self_s: time in which any operation ran.
      idle_s: time in which no operation ran.
      self_window_share: `self_s` over the fact `window_s`.
      name: layer of the span, otherwise its function, or "idle".
      direction: "forward", "backward" or "recomputed"; None for unknown and idle spans.
      trips: trips of the outermost loop, counted from 1, such as "3" or "3-5"; None outside of loops or if unknown.
      operations: number of executions that start in the span.
      heaviest: operation with most of the span's time; for an idle span, the host's longest activity.
      line: Python line of that operation.
    """

    start_s: float
    duration_s: float
    self_s: float
    idle_s: float
    self_window_share: float
    name: str
    direction: str | None
    trips: str | None
    operations: int
    heaviest: str | None
    line: str | None


def timeline(
    trace: Trace,
    *,
    step: int | None = None,
    since_s: float | None = None,
    until_s: float | None = None,
    spans: int = 40,
    device: str | None = None,
) -> Answer[TimelineRow]:
    """Show what ran in a step, in order of time.

    Args:
      step: number of the step, as in the overview; by default a step of median duration.
      since_s: start of a window instead of a step, in seconds since the first event of the trace.
      until_s: end of the window.
      spans: maximum number of spans.
      device: name of the device, by default the first.

    Raises:
      UnknownName: the trace does not have the device.
      ProfileError: the trace does not have the step, the window is empty, or `spans` is not positive.
    """
    devices = chosen_devices(trace, device)
    if spans < 1:
        raise ProfileError(f"spans is {spans}; at least one is needed.")
    if not devices:
        notes = ("No data: the trace has no operations of any device.", *trace.problems)
        return Answer("timeline", {"devices": 0}, TimelineRow, (), notes)
    ops, steps = devices[0], trace.steps[devices[0].device]
    window = _window(ops, steps, step, (since_s, until_s))
    items = items_of(ops, window.start_ps, window.end_ps)
    rows = tuple(_rows(ops, items, cut(items, spans), window, trace.host_events))
    return Answer(
        name="timeline",
        facts=_totals(ops, steps, window, items),
        row_type=TimelineRow,
        rows=rows,
        notes=(*_notes(trace, device, window), *trace.problems),
        plots=(_span_lanes(rows), _operation_lanes(ops, window)),
    )


def _span_lanes(rows: Sequence[TimelineRow]) -> Lanes:
    spans = [
        Span(row.direction or "idle", row.start_s, row.start_s + row.duration_s, _label(row), row.name) for row in rows
    ]
    return Lanes("Passes and layers", spans)


def _label(row: TimelineRow) -> str:
    return " ".join(filter(None, (row.name, row.trips and f"trips {row.trips}", row.heaviest, row.line)))


def _operation_lanes(ops: Ops, window: "_Window") -> Lanes:
    """Plots the operations that start in the window, on as many lanes as run concurrently."""
    inside = np.flatnonzero((ops.start_ps >= window.start_ps) & (ops.start_ps < window.end_ps))
    columns = ops.which[inside], ops.tracks[inside], ops.start_ps[inside], ops.end_ps[inside]
    spans = []
    # The order of the spans is the order of the lanes on the page.
    for which, track, start, end in sorted(
        zip(*(column.tolist() for column in columns), strict=True), key=lambda row: row[1]
    ):
        operation = ops.operations[which]
        # Even tracks are loops and calls, odd ones other operations (`Ops.tracks`).
        lane = f"{'operations' if track % 2 else 'loops and calls'} {track // 2 + 1}"
        spans.append(Span(lane, start * PICOSECOND, end * PICOSECOND, operation.name, category_of(operation)))
    return Lanes("Operations, by category", spans)


@dataclass(frozen=True)
class _Window:
    """Window of the timeline.

    Attributes:
      step: number of the step; None for any other window.
      program: name of the step's module; None like `step`.
      start_ps, end_ps: edges of the window.
    """

    step: int | None
    program: str | None
    start_ps: int
    end_ps: int

    @property
    def duration_ps(self) -> int:
        return self.end_ps - self.start_ps


def _window(ops: Ops, steps: Sequence[Step], step: int | None, edges_s: tuple[float | None, float | None]) -> _Window:
    if step is not None and edges_s != (None, None):
        raise ProfileError("A timeline is of a step or of a window: give step, or since_s and until_s.")
    if step is not None or (edges_s == (None, None) and steps):
        ordered = sorted(steps, key=lambda each: each.duration_ps)
        found = [each for each in steps if each.number == step]
        if step is None:
            # The lower median: a step that exists, also for an even number of steps.
            found = ordered[(len(ordered) - 1) // 2 :]
        if not found:
            known = f"it has the steps {steps[0].number} to {steps[-1].number}" if steps else "it has no steps"
            raise ProfileError(
                f"The trace has no step {step} of {ops.device}: {known}. since_s and until_s give a window instead."
            )
        return _Window(found[0].number, found[0].program, found[0].start_ps, found[0].end_ps)
    whole = int(ops.covered[0, 0]), int(ops.covered[-1, 1])
    start, end = (each if at_s is None else round(at_s / PICOSECOND) for each, at_s in zip(whole, edges_s, strict=True))
    if end <= start:
        raise ProfileError(
            f"The window from {start * PICOSECOND:g} to {end * PICOSECOND:g} s is empty; operations ran from "
            f"{whole[0] * PICOSECOND:g} to {whole[1] * PICOSECOND:g} s."
        )
    return _Window(None, None, start, end)


def _rows(ops: Ops, items: Items, firsts: Sequence[int], window: _Window, host: HostEvents) -> Iterator[TimelineRow]:
    limits = [*firsts[1:], len(items.key)]
    first_alike: dict[Key, int] = {}
    kinds = np.array([first_alike.setdefault(replace(each, trip=0), row) for row, each in enumerate(items.keys)], int)
    starts = [window.start_ps, *items.start_ps[list(firsts[1:])].tolist(), window.end_ps]
    for first, limit, start, end in zip(firsts, limits, starts, starts[1:], strict=False):
        part = slice(first, limit)
        key, size = items.key[part], items.size_ps[part]
        idle_ps = float(size[key == 0].sum())
        # Trips count together; otherwise idle time could exceed each of many short trips.
        alike = kinds[key]
        work = np.flatnonzero(key > 0) if idle_ps < size.sum() / 2 else np.arange(len(key))
        most = _heaviest(alike[work], size[work])
        named = items.keys[most]
        # 0 stands for pieces outside of loops.
        trips = sorted({items.keys[each].trip for each in np.unique(key).tolist()} - {0})
        heaviest, line = _example(ops, items, np.flatnonzero(alike == most) + first, host)
        yield TimelineRow(
            start_s=(start - window.start_ps) * PICOSECOND,
            duration_s=(end - start) * PICOSECOND,
            self_s=(float(size.sum()) - idle_ps) * PICOSECOND,
            idle_s=idle_ps * PICOSECOND,
            self_window_share=(float(size.sum()) - idle_ps) / window.duration_ps,
            name="idle" if named == IDLE else "/".join(named.path),
            direction=named.direction,
            trips=f"{trips[0]}-{trips[-1]}" if len(trips) > 1 else str(trips[0]) if trips else None,
            operations=int(np.diff(np.searchsorted(items.executions_ps, (start, end)))[0]),
            heaviest=heaviest,
            line=line,
        )


def _heaviest(column: np.ndarray, size: np.ndarray) -> int:
    """Returns the value of `column` with the largest total `size`."""
    values, inverse = np.unique(column, return_inverse=True)
    return int(values[np.argmax(np.bincount(inverse.reshape(-1), weights=size))])


def _example(ops: Ops, items: Items, rows: np.ndarray, host: HostEvents) -> tuple[str | None, str | None]:
    """Returns the heaviest operation and its line; for idle items, the host's activity in the longest one."""
    row = _heaviest(items.operation[rows], items.size_ps[rows])
    if row < 0:
        longest = rows[np.argmax(items.size_ps[rows])]
        return activity_of(host, int(items.start_ps[longest]), int(items.end_ps[longest])), None
    operation = ops.operations[row]
    source = operation.instruction.source() if operation.instruction else None
    return operation.name, str(source) if source else None


def _totals(ops: Ops, steps: Sequence[Step], window: _Window, items: Items) -> dict[str, Any]:
    by_key = np.bincount(items.key, weights=items.size_ps, minlength=len(items.keys)) * PICOSECOND
    sums = dict.fromkeys(("forward", "backward", "recomputed", None), 0.0)
    for key, size_s in zip(items.keys[1:], by_key[1:].tolist(), strict=True):
        sums[key.direction] += size_s
    unattributed_s = sums.pop(None)
    return {
        "device": ops.device,
        "program": window.program,
        "step": window.step,
        "steps": len(steps),
        "start_s": window.start_ps * PICOSECOND,
        "window_s": window.duration_ps * PICOSECOND,
        "busy_s": float(by_key[1:].sum()),
        "idle_s": float(by_key[0]),
        **{f"{name}_s": size_s for name, size_s in sums.items()},
        "unattributed_s": unattributed_s,
    }


def _notes(trace: Trace, device: str | None, window: _Window) -> Iterator[str]:
    yield "A span has the name of its longest part; self and idle times sum to the window; shares are fractions of it."
    if device is None and len(trace.devices) > 1:
        yield f"The first of {len(trace.devices)} devices; --device selects another."
    if window.step is None:
        yield f"A window of {number('_s', window.duration_ps * PICOSECOND)}, not a step: none was selected or known."
