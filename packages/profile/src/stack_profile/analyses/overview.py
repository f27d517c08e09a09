"""Step times, their variation, the devices' idle time, and the host's activity in idle time.

A step runs from one start of the program with the longest total time to its next start. The device is idle while no
operation runs. Host events during the idle time point to its cause.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stack_core.report.fields import number
from stack_core.report.plots import Chart, Series
from stack_profile.analyses.input_pipeline import InputWait, input_wait
from stack_profile.analyses.ops import chosen_devices, ops
from stack_profile.answer import Answer
from stack_profile.traces.categories import HOST_COPY, category_of
from stack_profile.traces.intervals import gaps, overlap, union
from stack_profile.traces.operations import PICOSECOND, HostEvents, Ops, Step
from stack_profile.traces.trace import Trace

__all__ = ["OverviewRow", "activity_of", "idle_by_event", "overview"]

_IDLE: Final = 0.1  # If devices idle for at least this share of the steps, the step is bound by the host or the input.
_SHOWN: Final = 3


@dataclass(frozen=True)
class OverviewRow:
    """One step on one device.

    Attributes:
      step_number: the program's own number (`jax.profiler.StepTraceAnnotation`), otherwise counted from 1.
      program: name of the step's module.
      start_s: time since the first event of the trace.
      step_s: duration of the step.
      busy_s, idle_s: parts of `step_s` with and without a running operation.
      idle_step_share: `idle_s / step_s`; None for a step of length 0.
      kernels: number of kernels and copies that started in the step; None on other devices than GPUs.
      host_copies: number of copies to the host.
      gaps: number of idle intervals; None on other devices than GPUs.
    """

    step_number: int
    device: str
    program: str
    start_s: float
    step_s: float
    busy_s: float
    idle_s: float
    idle_step_share: float | None
    kernels: int | None
    host_copies: int | None
    gaps: int | None


def overview(trace: Trace, *, device: str | None = None) -> Answer[OverviewRow]:
    """Time the steps: duration, variation, idle time, and the host's activity meanwhile.

    Args:
      device: one device instead of all of them.

    Raises:
      UnknownName: the trace does not have the device.
    """
    devices = chosen_devices(trace, device)
    rows = [row for each in devices for row in _rows(each, trace.steps[each.device])]
    idle = [_idle(each, trace.steps[each.device]) for each in devices]
    waits = _Waits.of(
        trace.host_events, np.concatenate(idle) if idle else np.zeros((0, 2), np.int64), input_wait(trace, devices)
    )
    return Answer(
        name="overview",
        facts={**_totals(devices, rows, waits), **_latenesses(trace)},
        row_type=OverviewRow,
        rows=tuple(rows),
        notes=(*_notes(trace, device, rows, waits), *trace.problems),
        plots=(_chart(rows),) if rows else (),
    )


def _chart(rows: Sequence[OverviewRow]) -> Chart:
    """Plots the step times in order, with their quartiles."""
    series = []
    for device in dict.fromkeys(row.device for row in rows):
        steps = [row for row in rows if row.device == device]
        points = [(float(row.step_number), row.step_s) for row in steps]
        series.append(Series(device, "dots", points, [f"step {row.step_number}" for row in steps]))
    quartiles = np.percentile([row.step_s for row in rows], (25, 50, 75)).tolist()
    first, last = float(min(row.step_number for row in rows)), float(max(row.step_number for row in rows))
    levels = zip(("a quarter is faster", "median", "a quarter is slower"), quartiles, strict=True)
    lines = [Series(name, "line", [(first, level), (last, level)]) for name, level in levels]
    return Chart("Step times", "step", "step_time_s", [*series, *lines])


@dataclass(frozen=True)
class _Waits:
    """The host's activity while devices were idle.

    Attributes:
      known: True if the trace has host events.
      inside_s: idle time while the host was inside a JAX call.
      outside_s: the remaining idle time.
      input_s: idle time while the program was in its input pipeline, inside JAX calls or not; None if the trace does
        not show the input pipeline.
      by_name: the host events with the most idle time, as pairs (name, seconds of idle time).
    """

    known: bool
    inside_s: float
    outside_s: float
    input_s: float | None
    by_name: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, host: HostEvents, idle: np.ndarray, wait: InputWait | None) -> "_Waits":
        """Computes the waits from `idle`, rows (start, end) of picoseconds in which at least one device was idle."""
        # Idle times of several devices overlap, and the host's time counts once.
        idle = union(idle[:, 0], idle[:, 1])
        calls = host.jax_calls
        inside_ps = int(overlap(union(host.start_ps[calls], host.end_ps[calls]), idle).sum())
        idle_ps = int(np.sum(idle[:, 1] - idle[:, 0]))
        return cls(
            known=len(host.which) > 0,
            inside_s=inside_ps * PICOSECOND,
            outside_s=(idle_ps - inside_ps) * PICOSECOND,
            input_s=wait.idle_s if wait else None,
            by_name=idle_by_event(host, idle),
        )


def idle_by_event(host: HostEvents, idle: np.ndarray) -> tuple[tuple[str, float], ...]:
    """Returns the host events with the most idle time, as pairs (name, seconds), the longest first.

    Args:
      host: events of the host.
      idle: disjoint rows (start, end) of picoseconds, in order of time.
    """
    each_ps = overlap(np.stack([host.start_ps, host.end_ps], axis=1), idle)
    # Nested events of one name count several times here: take twice as many candidates, and rank them by their
    # union.
    longest = np.argsort(-np.bincount(host.which, each_ps, minlength=len(host.names)))[: 2 * _SHOWN]
    found: list[tuple[str, float]] = []
    for row in longest.tolist():
        events = np.flatnonzero(host.which == row)
        seconds = overlap(union(host.start_ps[events], host.end_ps[events]), idle).sum() * PICOSECOND
        found += [(host.names[row], float(seconds))] if seconds else []
    found.sort(key=lambda pair: -pair[1])
    return tuple(found[:_SHOWN])


def activity_of(host: HostEvents, start_ps: int, end_ps: int) -> str | None:
    """Returns the host's activity in a gap: the shortest event whose overlap is close to the largest."""
    overlap = np.minimum(host.end_ps, end_ps) - np.maximum(host.start_ps, start_ps)
    if overlap.max(initial=0) <= 0:
        return None
    most = np.flatnonzero(overlap >= _AS_MUCH * overlap.max())
    return host.names[int(host.which[most[np.argmin((host.end_ps - host.start_ps)[most])]])]


# An event covers "nearly the most" of a gap from this share of the largest overlap on; the shortest one is innermost.
_AS_MUCH: Final = 0.8


def _rows(ops_: Ops, steps: Sequence[Step]) -> Iterator[OverviewRow]:
    is_kernel = np.array([bool(each.kernel) for each in ops_.operations], bool)
    is_copy = np.array([category_of(each) == HOST_COPY for each in ops_.operations], bool)
    copies = ops_.start_ps[is_copy[ops_.which]]
    for step in steps:
        row = _row(ops_, step)
        if is_kernel.any():
            started = np.searchsorted(ops_.start_ps, (step.start_ps, step.end_ps))
            copied = np.searchsorted(copies, (step.start_ps, step.end_ps))
            count = len(gaps(ops_.covered, step.start_ps, step.end_ps))
            row = replace(row, kernels=int(np.diff(started)[0]), host_copies=int(np.diff(copied)[0]), gaps=count)
        yield row


def _row(ops_: Ops, step: Step) -> OverviewRow:
    free = gaps(ops_.covered, step.start_ps, step.end_ps)
    step_s = step.duration_ps * PICOSECOND
    idle_s = int(np.sum(free[:, 1] - free[:, 0])) * PICOSECOND
    return OverviewRow(
        step_number=step.number,
        device=ops_.device,
        program=step.program,
        start_s=step.start_ps * PICOSECOND,
        step_s=step_s,
        busy_s=step_s - idle_s,
        idle_s=idle_s,
        idle_step_share=idle_s / step_s if step_s else None,
        kernels=None,
        host_copies=None,
        gaps=None,
    )


def _idle(ops_: Ops, steps: Sequence[Step]) -> np.ndarray:
    """Returns the idle intervals of a device between the start of its first step and the end of its last."""
    return gaps(ops_.covered, steps[0].start_ps, steps[-1].end_ps) if steps else np.zeros((0, 2), np.int64)


def _totals(devices: Sequence[Ops], rows: Sequence[OverviewRow], waits: _Waits) -> dict[str, Any]:
    durations = [row.step_s for row in rows]
    total_s = sum(durations, 0.0)
    # None instead of 0, because idle time is unknown without steps.
    idle_s = sum((row.idle_s for row in rows), 0.0) if rows else None
    mean_s = statistics.fmean(durations) if durations else None
    deviation_s = statistics.stdev(durations) if len(durations) > 1 else None
    return {
        "devices": len(devices),
        "steps": len(rows) or None,
        "median_step_s": statistics.median(durations) if durations else None,
        "mean_step_s": mean_s,
        "deviation_s": deviation_s,
        "shortest_s": min(durations, default=None),
        "longest_s": max(durations, default=None),
        "deviation_mean_share": deviation_s / mean_s if deviation_s is not None and mean_s else None,
        "all_steps_s": total_s if rows else None,
        "idle_s": idle_s,
        "idle_steps_share": idle_s / total_s if idle_s is not None and total_s else None,
        "bound_by": _bound(idle_s, total_s, waits),
    }


def _latenesses(trace: Trace) -> dict[str, float | None]:
    """Returns waits of the sampling threads after their timers, see `Lateness`; None without samples."""
    found = [stacks.lateness for stacks in trace.host_stacks if stacks is not None and stacks.lateness is not None]
    interpreter = np.concatenate([np.zeros(0), *(each.interpreter_ps for each in found)]) * PICOSECOND
    queued = [each.processor_ps for each in found if each.processor_ps is not None]
    processor = np.concatenate([np.zeros(0), *queued]) * PICOSECOND
    return {
        "mean_interpreter_wait_s": float(interpreter.mean()) if len(interpreter) else None,
        "longest_interpreter_wait_s": float(interpreter.max()) if len(interpreter) else None,
        "mean_processor_wait_s": float(processor.mean()) if len(processor) else None,
    }


def _bound(idle_s: float | None, total_s: float, waits: _Waits) -> str | None:
    if idle_s is None or not total_s:
        return None
    if idle_s < _IDLE * total_s:
        return "device"
    if not waits.known:
        return None
    if waits.input_s is not None and 2 * waits.input_s >= waits.inside_s + waits.outside_s:
        return "input"
    return "host inside JAX" if waits.inside_s > waits.outside_s else "host outside JAX"


def _notes(trace: Trace, device: str | None, rows: Sequence[OverviewRow], waits: _Waits) -> Iterator[str]:
    if not trace.devices:
        yield "No data: the trace has no operations of any device."
        return
    if not rows:
        yield "Steps are unknown: the events of this trace do not identify the executions of a program."
        return
    idle = f"{number('_s', waits.inside_s + waits.outside_s)} idle from the first step to the last"
    if not waits.known:
        yield f"{idle}; the trace has no events of the host, so its activity is unknown."
        return
    yield (
        f"{idle}: {number('_s', waits.inside_s)} while the host was in JAX (tracing, compiling, dispatching), "
        f"{number('_s', waits.outside_s)} while it was elsewhere (input, logging, other Python)."
    )
    if waits.input_s is not None:
        yield f"{number('_s', waits.input_s)} idle while the program waited for input, see `input_pipeline`."
    if waits.by_name:
        listed = ", ".join(f"{name} {number('_s', seconds)}" for name, seconds in waits.by_name)
        yield f"Host events in the idle time: {listed}."
    if any(stacks is not None and stacks.lateness is not None for stacks in trace.host_stacks):
        yield (
            "The interpreter wait is the time that a thread of the profiler waited for the interpreter lock after its "
            "timer. The program's threads wait as long when they get ready to run Python."
        )
    heaviest = ops(trace, by="category", device=device).rows[:_SHOWN]
    listed = ", ".join(f"{row.name} {number('_share', row.busy_share)}" for row in heaviest)
    yield f"Shares of the busy time: {listed}."
