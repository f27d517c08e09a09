"""Advice: avoidable time by cause, with its evidence, an estimate of the gain, and the change to try.

Gains are estimates of the time that a change saves in this capture, per device. They overlap: the sum of all gains is
not a prediction. Causes on the host share the devices' idle time: compilations first, then input, garbage collections,
then all else.
"""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stack_core.report.fields import number
from stack_core.report.plots import bars
from stack_profile.analyses.advice_kernels import find_in_kernels
from stack_profile.analyses.advice_operations import Finding, find_in_operations
from stack_profile.analyses.compile import compilation_events, compilations
from stack_profile.analyses.input_pipeline import input_pipeline, input_processes, input_wait
from stack_profile.analyses.ops import chosen_devices
from stack_profile.analyses.overview import idle_by_event
from stack_profile.analyses.roofline import chip_of
from stack_profile.answer import Answer
from stack_profile.traces.intervals import gaps, overlap, union
from stack_profile.traces.operations import PICOSECOND, Ops
from stack_profile.traces.trace import Trace

__all__ = ["AdviceRow", "advice"]


@dataclass(frozen=True)
class AdviceRow:
    """Avoidable time of one cause.

    Attributes:
      cause: name of the cause, such as "casts" or "recompilation".
      gain_s: estimated gain per device in the capture.
      gain_elapsed_share: `gain_s` as a share of `elapsed_s`.
      evidence: measured facts.
      change: change to try.
      line: Python line; "" if unknown.
      program: name of the program; "" for causes on the host.
      event: operation or host event that shows the cause.
    """

    cause: str
    gain_s: float
    gain_elapsed_share: float | None
    evidence: str
    change: str
    line: str
    program: str
    event: str


def advice(
    trace: Trace, *, min_share: float = 0.01, chip: str | None = None, device: str | None = None
) -> Answer[AdviceRow]:
    """Show what takes avoidable time, the largest estimated gain first.

    Args:
      min_share: leave out gains below this fraction of the elapsed time.
      chip: name of a chip that `stack chips` lists, by default the trace's own.
      device: one device instead of all of them.

    Raises:
      UnknownName: the chip or the device is unknown.
    """
    devices = chosen_devices(trace, device)
    peaks, note = chip_of(trace, chip)
    windows = [_window(trace, each) for each in devices]
    elapsed_s = max((end - start for start, end in windows), default=0) * PICOSECOND
    found = [
        *_find_on_host(trace, devices, windows),
        *find_in_operations(trace, devices, peaks),
        *find_in_kernels(trace, devices, peaks),
    ]
    rows = sorted((_row(each, len(devices), elapsed_s) for each in found), key=lambda row: -row.gain_s)
    shown = tuple(row for row in rows if elapsed_s and row.gain_s >= min_share * elapsed_s)
    return Answer(
        name="advice",
        facts={"devices": len(devices), "elapsed_s": elapsed_s or None},
        row_type=AdviceRow,
        rows=shown,
        notes=(*_notes(devices, shown, note, min_share), *trace.problems),
        plots=(bars("Estimated gain by cause", shown, "gain_s", label="cause"),) if shown else (),
    )


def _row(found: Finding, devices: int, elapsed_s: float) -> AdviceRow:
    gain_s = found.gain_s / devices
    share = gain_s / elapsed_s if elapsed_s else None
    return AdviceRow(found.cause, gain_s, share, found.evidence, found.change, found.line, found.program, found.event)


def _window(trace: Trace, ops: Ops) -> tuple[int, int]:
    """Returns start and end of a device's steps; without several steps, of all calls of JAX and operations."""
    steps = trace.steps[ops.device]
    # A function that is compiled for each call has a step of a single run.
    if len(steps) > 1:
        return steps[0].start_ps, steps[-1].end_ps
    host = trace.host_events
    first = min([int(ops.covered[0, 0]), *host.start_ps[host.jax_calls].tolist()])
    return first, int(ops.covered[-1, 1])


def _find_on_host(trace: Trace, devices: Sequence[Ops], windows: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Divides the idle time of devices among compilations, the input, and other work of the host."""
    events = list(compilation_events(trace.host_events))
    compiling = union(*(np.array([event[column] for event in events], np.int64) for column in (1, 2)))
    idle = [gaps(each.covered, *window) for each, window in zip(devices, windows, strict=True)]
    idle_s = sum(int(np.sum(each[:, 1] - each[:, 0])) for each in idle) * PICOSECOND
    compile_s = sum(int(overlap(each, compiling).sum()) for each in idle) * PICOSECOND
    yield from _compilations(trace, events, idle)
    wait = input_wait(trace, devices)
    # An input that compiles, as the first batch does, is a compilation.
    input_s = max(min(wait.idle_s * len(devices), idle_s - compile_s), 0.0) if wait else 0.0
    if wait and input_s:
        stages = input_pipeline(trace).rows
        stage = max(stages, key=lambda row: row.idle_s)
        yield Finding(
            "slow input",
            input_s,
            f"the program waited {number('_s', wait.waited_s)} for input, {number('_s', wait.idle_s)} of it while a "
            f"device was idle, mostly in {stage.stage}: {number('_s', stage.call_self_s)} per call",
            "Prepare batches ahead of the step: prefetch in threads or worker processes, and move costly "
            "transformations offline.",
            event=stage.stage,
            line=stage.host_line,
        )
    collecting = [each.pauses for each in trace.host_stacks if each is not None]
    pauses = union(*(np.concatenate([[0], *(getattr(each, name) for each in collecting)]) for name in _EDGES))
    pauses = pauses[pauses[:, 1] > 0]
    collect_s = max(min(_during(pauses, idle), idle_s - compile_s - input_s), 0.0) if len(pauses) else 0.0
    if collect_s:
        yield Finding(
            "garbage collection",
            collect_s,
            f"Python collected garbage {sum(len(each.start_ps) for each in collecting):,} times, for "
            f"{number('_s', _length_s(pauses))}, of which devices were idle for {number('_s', collect_s)}",
            "Call gc.freeze() after the set-up, or gc.disable() and gc.collect() every few hundred steps right after "
            "a dispatch, and create fewer cyclic objects.",
        )
    host_s = idle_s - compile_s - input_s - collect_s
    if host_s > 0 and len(trace.host_events.which):
        free = union(*(np.concatenate([each[:, column] for each in idle]) for column in (0, 1)))
        event, inside_s = next(iter(idle_by_event(trace.host_events, free)), ("", 0.0))
        share = host_s / idle_s
        yield Finding(
            "host-bound steps",
            host_s,
            f"devices were idle for {number('_s', idle_s)}, {share:.0%} of it neither compiling nor waiting for input"
            + _gap_sizes(trace, idle)
            + (f"; the longest event meanwhile is {event}, {number('_s', inside_s)}" if event else ""),
            "Let the host run ahead of devices: read results (float(), np.asarray, print) some steps later, move "
            "other Python work behind the dispatch, or run several steps in one program with lax.scan.",
            event=event,
            line=_host_line(trace, devices, free, compiling),
        )


def _host_line(trace: Trace, devices: Sequence[Ops], idle: np.ndarray, compiling: np.ndarray) -> str:
    """Returns the most frequent line of the threads that call JAX in idle time outside of compilations and input."""
    lines: collections.Counter[str] = collections.Counter()
    inputs = {each.prefix: each for each in input_processes(trace, devices)}
    for each in trace.calling_samples:
        busy = [compiling]
        if part := inputs.get(each.prefix):
            rows = part.inside[part.calls_jax[part.inside]]
            busy.append(np.stack([part.events.start_ps[rows], part.events.end_ps[rows]], axis=1))
        blocked = union(*np.concatenate(busy).T)
        lines.update(each.lines(np.concatenate([gaps(blocked, *interval) for interval in idle.tolist()])))
    return next(iter(lines.most_common(1)), ("", 0))[0]


def _gap_sizes(trace: Trace, idle: Sequence[np.ndarray]) -> str:
    """Describes the idle times between the kernels of a GPU; empty for other devices."""
    sizes = np.concatenate([each[:, 1] - each[:, 0] for each in idle])
    if not len(sizes) or not any(each.kernel for ops in trace.devices for each in ops.operations):
        return ""
    # Half of the idle time is in gaps of at least this size.
    ordered = np.sort(sizes)
    half = ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)] * PICOSECOND
    return f", in {len(sizes):,} gaps between kernels, half of the time in gaps of {number('_s', half)} or more"


def _compilations(
    trace: Trace, events: Sequence[tuple[str, int, int]], idle: Sequence[np.ndarray]
) -> Iterator[Finding]:
    """Yields repeated compilations of each function, and the first ones of all, with the idle time meanwhile."""
    first: list[tuple[str, np.ndarray]] = []
    for row in compilations(trace).rows:
        times = np.array([event[1:] for event in events if event[0] == row.name], np.int64).reshape(-1, 2)
        # The first program is needed; it was compiled before the capture unless all were compiled meanwhile.
        repeated = times[1:] if len(times) >= row.programs else times
        first += [(row.name, times[:1])] if len(repeated) < len(times) else []
        if len(repeated):
            yield Finding(
                "recompilation",
                _during(repeated, idle),
                f"{row.name} has {row.programs} programs, {len(repeated)} of them compiled again for "
                f"{number('_s', _length_s(repeated))}" + (f"; {row.why[:160]}" if row.why else ""),
                "Give the function arguments of few shapes and dtypes: pad or bucket them, pass Python numbers as "
                "arrays, and create functions with jax.jit once.",
                program=row.name,
                event=row.name,
            )
    if first:
        times = np.concatenate([each for _, each in first])
        longest = max(first, key=lambda each: _length_s(each[1]))[0]
        yield Finding(
            "compilation",
            _during(times, idle),
            f"{len(first):,} first compilations took {number('_s', _length_s(times))}, the longest is {longest}",
            "Compile before the loop, as by running the functions once or jax.jit(f).lower(...).compile(), and keep a "
            "compile cache (jax_compilation_cache_dir).",
            program=longest,
            event=longest,
        )


_EDGES: Final = ("start_ps", "end_ps")


def _length_s(times: np.ndarray) -> float:
    return int(np.sum(times[:, 1] - times[:, 0])) * PICOSECOND


def _during(times: np.ndarray, idle: Sequence[np.ndarray]) -> float:
    """Computes the idle seconds of all devices within some intervals."""
    covered = union(times[:, 0], times[:, 1])
    return sum(int(overlap(each, covered).sum()) for each in idle) * PICOSECOND


def _notes(devices: Sequence[Ops], rows: Sequence[AdviceRow], note: str, min_share: float) -> Iterator[str]:
    if not devices:
        yield "No data: the trace has no operations of any device."
        return
    if not rows:
        yield f"No cause takes {min_share:.0%} of the elapsed time or more; --min-share 0 shows smaller ones."
    yield "Gains are estimates per device, and overlap: they do not sum to a prediction."
    yield note
