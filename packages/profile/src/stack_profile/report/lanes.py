"""Lanes of the timeline, and those derived by analyses: collectives, compilations, and stages of the input pipeline."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_profile.analyses.compile import compilation_events
from stack_profile.analyses.input_pipeline import InputProcess, input_processes
from stack_profile.captures.processes import names_of
from stack_profile.traces.collectives import Axes, Collectives, collectives_of, event_waits_of
from stack_profile.traces.instructions import Instruction
from stack_profile.traces.intervals import nesting, tracks
from stack_profile.traces.trace import Trace

__all__ = ["AddKinds", "Lane", "Place", "derived_lanes", "host_group"]


@dataclass(frozen=True)
class Lane:
    """A strip of the timeline.

    Attributes:
      group: name of the device, or of the host.
      name: name of the strip in its group.
      type: "steps", "operations" or "thread"; "stacks" of a thread, "gc"; "collectives", "compile" and "input" show
        events of these again; "work" shows requests, engine steps, rollouts and rewards.
      rows: number of rows; events of one row do not overlap.
      start_ps, duration_ps, self_ps, kind, row: columns of the events, in order of their start. `kind` is an index of
        `Recorded.kinds`, `self_ps` the time without the events that an event contains.
      extra_ps: a further time of each event by the type of its lane, or None.
      process: index of the process.
      keys: correlation id and run id of each event, shape [2, events], see `stack_profile.report.flows`; or None.
    """

    group: str
    name: str
    type: str
    rows: int
    start_ps: np.ndarray
    duration_ps: np.ndarray
    self_ps: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    extra_ps: np.ndarray | None = None
    process: int = 0
    keys: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.kind)

    def keep(self, rows: np.ndarray) -> "Lane":
        """Returns the lane with some of its events."""
        columns = (each[rows] for each in (self.start_ps, self.duration_ps, self.self_ps, self.kind, self.row))
        keys = None if self.keys is None else self.keys[:, rows]
        return Lane(self.group, self.name, self.type, self.rows, *columns, process=self.process, keys=keys)


AddKinds = Callable[[Sequence[dict[str, Any]]], int]  # adds kinds, and returns the index of the first
Place = Callable[[Instruction], dict[str, Any]]  # layer, scope, line and stack of an instruction


def derived_lanes(trace: Trace, add: AddKinds, place: Place) -> Iterator[Lane]:
    """Yields the lanes of collectives by device, of compilations, and of input stages by thread."""
    yield from _collectives(trace, add, place)
    yield from _compilations(trace, add)
    for process in input_processes(trace, trace.devices):
        yield from _input(trace, process, add)


def host_group(trace: Trace, prefix: str) -> str:
    """Returns the name of a process's group of lanes; `prefix` starts the names of its devices."""
    index = names_of(trace.spaces).index(prefix)
    return f"host {prefix.removesuffix(':') or next(iter(trace.spaces[index].hosts), '') or 'host'}"


def _collectives(trace: Trace, add: AddKinds, place: Place) -> Iterator[Lane]:
    """Yields lanes whose self times are exposed times, and whose extra times are waits, -1 if unknown."""
    found = collectives_of(trace.devices, Axes.of(trace.about, len(trace.devices)))
    waits = event_waits_of(found)
    for device, collectives in found.items():
        if not collectives:
            continue
        first = add([_collective(each, place) for each in collectives])
        start = np.concatenate([each.start_ps for each in collectives])
        end = np.concatenate([each.end_ps for each in collectives])
        exposed = np.concatenate([each.exposed_ps for each in collectives])
        wait = np.concatenate([waits[device][each.identity] for each in collectives])
        kind = first + np.repeat(np.arange(len(collectives)), [len(each.start_ps) for each in collectives])
        order = np.argsort(start, kind="stable")
        row = tracks(start[order], end[order])
        columns = (start[order], (end - start)[order], exposed[order], kind[order], row, wait[order].astype(float))
        yield Lane(device, "collectives", "collectives", int(row.max()) + 1, *columns)


def _collective(each: Collectives, place: Place) -> dict[str, Any]:
    instruction = each.operation.instruction
    kind = {
        "type": "collective",
        "name": each.operation.name,
        "module": each.operation.module,
        "category": "collective",
        "collective": each.kind.name,
        "axis": each.kind.axis,
        "array_bytes": each.kind.array_bytes,
        "sent_bytes": each.kind.sent_bytes,
    }
    return kind | place(instruction) if instruction is not None else kind


def _compilations(trace: Trace, add: AddKinds) -> Iterator[Lane]:
    events = sorted(compilation_events(trace.host_events), key=lambda event: event[1])
    if not events:
        return
    names = list(dict.fromkeys(name for name, _, _ in events))
    first = add([{"type": "compile", "name": name, "category": "compilation"} for name in names])
    start, end = (np.array([event[column] for event in events], np.int64) for column in (1, 2))
    row = tracks(start, end)
    # Host events of several processes are one table without the process.
    group = host_group(trace, names_of(trace.spaces)[0]) if len(trace.spaces) == 1 else "all hosts"
    kind = first + np.array([names.index(name) for name, _, _ in events])
    length = end - start
    yield Lane(group, "compilations", "compile", int(row.max()) + 1, start, length, length.astype(float), kind, row)


def _input(trace: Trace, process: InputProcess, add: AddKinds) -> Iterator[Lane]:
    """Yields a lane per thread; times are those within the steps, and extra times are waits with an idle device."""
    events, group = process.events, host_group(trace, process.prefix)
    for thread in sorted(np.unique(events.thread[process.inside]).tolist(), key=lambda each: each != events.calling):
        rows = process.inside[events.thread[process.inside] == thread]
        start, end = events.start_ps[rows].clip(process.start_ps), events.end_ps[rows].clip(max=process.end_ps)
        order = np.lexsort((-(end - start), start))
        rows, start, end = rows[order], start[order], end[order]
        is_calling = thread == events.calling
        first = add(
            [
                {
                    "type": "input",
                    "name": stage.name,
                    "category": stage.kind,
                    "detail": stage.detail,
                    "calling": is_calling,
                }
                for stage in events.stages
            ]
        )
        row = nesting(start, end)
        idle = process.idle_ps[rows] if is_calling else np.zeros(len(rows))
        name = "input" if is_calling else f"input, thread {thread + 1}"
        columns = (start, end - start, process.self_ps[rows], first + events.which[rows])
        yield Lane(group, name, "input", int(row.max()) + 1, *columns, row, idle.astype(float))
