"""Time that a program waits for its input pipeline, by stage.

The program waits while the thread that calls JAX is in the pipeline: while it makes a batch itself, takes a prefetched
one, or transfers one to devices. Waiting costs nothing as long as the devices are busy; only idle devices lose time.
Stages have self times, without the stages that they call.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stack_core.report.fields import number
from stack_core.report.plots import bars
from stack_profile.analyses.ops import chosen_devices
from stack_profile.answer import Answer
from stack_profile.captures.processes import names_of
from stack_profile.traces.host_stacks import HostStacks, thread_of
from stack_profile.traces.input_stages import ANNOTATION, Stage, StageEvents, stage_events
from stack_profile.traces.intervals import gaps, self_times, union
from stack_profile.traces.operations import PICOSECOND, Ops, Step
from stack_profile.traces.trace import Trace

__all__ = ["InputProcess", "InputRow", "InputWait", "input_pipeline", "input_processes", "input_wait"]


@dataclass(frozen=True)
class InputRow:
    """One stage of the pipeline, from the first step to the last.

    Attributes:
      stage: name of the stage.
      kind: Grain's "read", "preprocessing" or "prefetch", or "transfer" to devices, or "annotation".
      threads: number of threads that ran the stage.
      calls: number of calls that overlap the steps.
      self_s: self time on all threads, without the stages that it calls.
      call_self_s: self time per call.
      waited_s: part of `self_s` on the thread that calls JAX.
      waited_steps_share: `waited_s` as a share of `all_steps_s`.
      idle_s: part of `waited_s` in which a device was idle.
      idle_steps_share: `idle_s` as a share of `all_steps_s`.
      detail: arguments of the stage, such as its function.
      host_line: Python line in most samples of the threads that run the stage, without the stages that it calls; ""
        without samples.
    """

    stage: str
    kind: str
    threads: int
    calls: int
    self_s: float
    call_self_s: float
    waited_s: float
    waited_steps_share: float
    idle_s: float
    idle_steps_share: float
    detail: str
    host_line: str


def input_pipeline(trace: Trace, *, annotation: str = ANNOTATION, device: str | None = None) -> Answer[InputRow]:
    """Show how long the program waits for its input, by stage of the pipeline.

    Args:
      annotation: name of the jax.profiler.TraceAnnotation around the input of a program that does not use Grain.
      device: one device instead of all of them.

    Raises:
      UnknownName: the trace does not have the device.
    """
    parts = list(input_processes(trace, chosen_devices(trace, device), annotation))
    steps_s = sum((part.steps_s for part in parts), 0.0)
    rows = sorted(_rows(parts, steps_s), key=lambda row: (-row.idle_s, -row.waited_s, -row.self_s))
    wait = _wait(parts)
    return Answer(
        name="input pipeline",
        facts=_totals(parts, rows, wait),
        row_type=InputRow,
        rows=tuple(rows),
        notes=(*_notes(parts, rows, wait), *trace.problems),
        plots=(bars("Waiting for input by stage", rows, "waited_s", label="stage"),) if rows else (),
    )


@dataclass(frozen=True)
class InputWait:
    """Waiting time for input between the first step and the last.

    Attributes:
      steps_s: time from the first step to the last.
      waited_s: time that the thread that calls JAX spent in the input pipeline.
      idle_s: part of `waited_s` in which a device was idle.
    """

    steps_s: float
    waited_s: float
    idle_s: float

    @property
    def bounds(self) -> bool:
        """True if the program is input-bound: devices idle for input for at least `BOUND_SHARE` of the time."""
        return self.idle_s >= BOUND_SHARE * self.steps_s


# The same share as `_IDLE` of the overview, so both analyses agree.
BOUND_SHARE: Final = 0.1


def input_wait(trace: Trace, devices: Sequence[Ops]) -> InputWait | None:
    """Computes the waiting time for input, or returns None for a trace without steps or input stages."""
    return _wait(list(input_processes(trace, devices, ANNOTATION)))


@dataclass(frozen=True)
class InputProcess:
    """Pipeline stages of one process during its steps.

    Attributes:
      prefix: start of the names of the process's devices.
      start_ps, end_ps: start of the first step and end of the last.
      events: executions of stages on all threads.
      inside: rows of `events` that overlap the steps.
      self_ps, idle_ps: self time of each event, and its part in which a device was idle, on any thread.
      steps: number of steps of the first device.
      steps_s: time from the first step to the last.
      device_idle_s: time in which at least one device was idle.
      lines: for each stage by its index, how often each Python line was sampled in it.
    """

    prefix: str
    start_ps: int
    end_ps: int
    events: StageEvents
    inside: np.ndarray
    self_ps: np.ndarray
    idle_ps: np.ndarray
    steps: int
    steps_s: float
    device_idle_s: float
    lines: Mapping[int, collections.Counter[str]]

    @property
    def calls_jax(self) -> np.ndarray:
        # -1 equals the number of no thread.
        return self.events.thread == (-1 if self.events.calling is None else self.events.calling)

    @property
    def is_known(self) -> bool:
        """True if the trace shows how the program gets its input; transfers by themselves do not."""
        kinds = {self.events.stages[row].kind for row in np.unique(self.events.which[self.calls_jax]).tolist()}
        return bool(kinds - {"transfer"})


def input_processes(trace: Trace, devices: Sequence[Ops], annotation: str = ANNOTATION) -> Iterator[InputProcess]:
    """Yields the stages of each process that has steps, during these steps."""
    for space, prefix, stacks in zip(trace.spaces, names_of(trace.spaces), trace.host_stacks, strict=True):
        # A pipeline feeds only the devices of its process.
        own = [each for each in devices if each.device.startswith(prefix) and trace.steps[each.device]]
        if own:
            steps = [trace.steps[each.device] for each in own]
            yield _process(prefix, stage_events(space, trace.base_ns, annotation), own, steps, stacks)


def _process(
    prefix: str,
    events: StageEvents,
    devices: Sequence[Ops],
    steps: Sequence[Sequence[Step]],
    stacks: HostStacks | None,
) -> InputProcess:
    first, last = min(each[0].start_ps for each in steps), max(each[-1].end_ps for each in steps)
    # A device that is idle for input loses time, even if another one is busy.
    free = np.concatenate([gaps(each.covered, first, last) for each in devices])
    idle = union(free[:, 0], free[:, 1])
    working = gaps(idle, first, last)
    inside = np.flatnonzero((events.end_ps > first) & (events.start_ps < last))
    self_ps, idle_ps = np.zeros(len(events.which)), np.zeros(len(events.which))
    for thread in np.unique(events.thread[inside]).tolist():
        rows = inside[events.thread[inside] == thread]
        start, end = events.start_ps[rows].clip(first), events.end_ps[rows].clip(max=last)
        self_ps[rows] = self_times(start, end, events.depth[rows])
        # Depth -1 gives the busy intervals of the devices to no stage, so the self times that remain are idle time.
        depth = np.concatenate([np.full(len(working), -1), events.depth[rows]])
        begins, ends = np.concatenate([working[:, 0], start]), np.concatenate([working[:, 1], end])
        idle_ps[rows] = self_times(begins, ends, depth)[len(working) :]
    return InputProcess(
        prefix=prefix,
        start_ps=first,
        end_ps=last,
        events=events,
        inside=inside,
        self_ps=self_ps,
        idle_ps=idle_ps,
        steps=len(steps[0]),
        steps_s=(last - first) * PICOSECOND,
        device_idle_s=int(np.sum(idle[:, 1] - idle[:, 0])) * PICOSECOND,
        lines=_sampled_lines(events, inside, stacks) if stacks else {},
    )


def _sampled_lines(
    events: StageEvents, inside: np.ndarray, stacks: HostStacks
) -> dict[int, "collections.Counter[str]"]:
    """Counts the sampled lines of each stage, for the innermost stage of a thread at each sample."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for thread in np.unique(events.thread[inside]).tolist():
        sampled = thread_of(events.lines[thread], stacks.threads)
        if sampled is None:
            continue
        rows = inside[events.thread[inside] == thread]
        stage = np.full(len(stacks.tick_ps), -1)
        for row in rows[np.argsort(events.depth[rows], kind="stable")].tolist():
            first, last = np.searchsorted(stacks.tick_ps, (events.start_ps[row], events.end_ps[row]))
            stage[first:last] = events.which[row]
        for each in np.unique(stage[stage >= 0]).tolist():
            found[each].update(stacks.lines_at(sampled, stage == each))
    return found


def _wait(parts: Sequence[InputProcess]) -> InputWait | None:
    if not parts or not any(part.is_known for part in parts):
        return None
    return InputWait(
        steps_s=sum((part.steps_s for part in parts), 0.0),
        waited_s=sum((float(part.self_ps[part.calls_jax].sum()) for part in parts), 0.0) * PICOSECOND,
        idle_s=sum((float(part.idle_ps[part.calls_jax].sum()) for part in parts), 0.0) * PICOSECOND,
    )


def _rows(parts: Sequence[InputProcess], steps_s: float) -> Iterator[InputRow]:
    stages = dict.fromkeys(stage for part in parts for stage in part.events.stages)
    for stage in stages:
        threads = calls = 0
        lines: collections.Counter[str] = collections.Counter()
        self_s = waited_s = idle_s = 0.0
        for part in parts:
            rows = part.inside[_are(part, stage)[part.inside]]
            mine = rows[part.calls_jax[rows]]
            # Summed over processes, in which the numbers of threads repeat.
            threads += len(np.unique(part.events.thread[rows]))
            calls += len(rows)
            self_s += float(part.self_ps[rows].sum()) * PICOSECOND
            waited_s += float(part.self_ps[mine].sum()) * PICOSECOND
            idle_s += float(part.idle_ps[mine].sum()) * PICOSECOND
            lines.update(part.lines.get(part.events.stages.index(stage), {}) if stage in part.events.stages else {})
        if calls:
            host_line = next(iter(lines.most_common(1)), ("", 0))[0]
            shares = (waited_s / steps_s, idle_s / steps_s)
            times = (self_s, self_s / calls, waited_s, shares[0], idle_s, shares[1])
            yield InputRow(stage.name, stage.kind, threads, calls, *times, stage.detail, host_line)


def _are(part: InputProcess, stage: Stage) -> np.ndarray:
    """Returns the mask of the events of a stage."""
    known = part.events.stages
    return part.events.which == (known.index(stage) if stage in known else -1)


def _totals(parts: Sequence[InputProcess], rows: Sequence[InputRow], wait: InputWait | None) -> dict[str, Any]:
    return {
        "steps": sum(part.steps for part in parts) or None,
        "all_steps_s": sum((part.steps_s for part in parts), 0.0) if parts else None,
        "idle_s": sum((part.device_idle_s for part in parts), 0.0) if parts else None,
        "input_waited_s": wait.waited_s if wait else None,
        "input_idle_s": wait.idle_s if wait else None,
        "input_waited_steps_share": wait.waited_s / wait.steps_s if wait else None,
        "input_idle_steps_share": wait.idle_s / wait.steps_s if wait else None,
        "beside_s": sum((row.self_s - row.waited_s for row in rows), 0.0) if rows else None,
        "input_bound": wait.bounds if wait else None,
    }


def _notes(parts: Sequence[InputProcess], rows: Sequence[InputRow], wait: InputWait | None) -> Iterator[str]:
    if not parts:
        yield "No data: steps are unknown, and thus also the time between them."
        return
    if wait is None:
        yield (
            "No data: the trace has neither stages of Grain nor blocks marked by "
            f'`with jax.profiler.TraceAnnotation("{ANNOTATION}")`. Mark the code that fetches a batch.'
        )
        return
    yield (
        f"{'' if wait.bounds else 'Not '}input-bound: of {number('_s', wait.steps_s)} from the first step to the last "
        f"the program waited {number('_s', wait.waited_s)} for its input, and a device was idle for "
        f"{number('_s', wait.idle_s)} of them; {BOUND_SHARE:.0%} count as bound."
    )
    work = [row for row in rows if row.self_s > row.waited_s]
    if work:
        most = max(work, key=lambda row: row.self_s - row.waited_s)
        yield (
            f"The stage with the most work parallel to the program is {most.stage}: "
            f"{number('_s', most.call_self_s)} a call, {most.threads} threads."
        )
    if any(row.kind == "prefetch" and "num_threads=0" in row.detail for row in rows):
        yield "The time of a prefetch without threads includes the work of its earlier stages."
