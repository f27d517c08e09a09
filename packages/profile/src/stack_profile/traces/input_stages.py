"""Input-related events on a process's threads: stages of Grain, transfers to devices, and the program's annotations.

Grain annotates its stages itself during a capture, on any thread. Other programs mark the code that gets their input by
`with jax.profiler.TraceAnnotation("next_batch"): ...`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from stack_profile.traces.intervals import nesting
from stack_profile.traces.xplane import MISSING, Line, Plane, Space

__all__ = ["ANNOTATION", "Stage", "StageEvents", "stage_events"]

ANNOTATION: Final = "next_batch"


@dataclass(frozen=True)
class Stage:
    """A stage of an input pipeline.

    Attributes:
      name: name of the stage.
      kind: Grain's "read", "preprocessing" or "prefetch", or "transfer" to devices, or "annotation".
      detail: arguments of the stage as Grain writes them, such as its function; "" for other stages.
    """

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class StageEvents:
    """Executions of stages, one per row.

    Attributes:
      stages: the distinct stages.
      which: index of each row's stage in `stages`.
      thread: number of the thread.
      start_ps, end_ps: times since the base of the trace.
      depth: number of enclosing stages on the same thread.
      calling: number of the thread that calls JAX; None without such a thread.
      lines: the trace's line of each thread.
    """

    stages: tuple[Stage, ...]
    which: np.ndarray
    thread: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    depth: np.ndarray
    calling: int | None
    lines: tuple[Line, ...]


def stage_events(space: Space, base_ns: int, annotation: str = ANNOTATION) -> StageEvents:
    """Returns the stages that ran in a process, with events named `annotation`, in picoseconds since `base_ns`."""
    stages: dict[Stage, int] = {}
    calls: dict[int, int] = {}
    columns = [np.zeros((5, 0), np.int64)]
    threads = list(_threads(space))
    for thread, (plane, line) in enumerate(threads):
        kinds, counts = np.unique(line.events.metadata, return_counts=True)
        calls[thread] = int(counts[[_CALL.match(plane.event_names.get(kind, "")) is not None for kind in kinds]].sum())
        found = _stages(plane, line, annotation)
        rows = np.flatnonzero(np.array([stage is not None for stage in found], bool))
        which = np.array([stages.setdefault(found[row], len(stages)) for row in rows], np.int64)  # pyrefly: ignore
        start = line.events.start_ps(base_ns)[rows]
        end = start + line.events.duration_ps[rows]
        columns.append(np.stack([which, np.full(len(rows), thread), start, end, nesting(start, end)]))
    which, thread, start, end, depth = np.concatenate(columns, axis=1)
    # The thread with the most calls runs the program's loop.
    calling = max(calls, key=lambda each: calls[each], default=None)
    calling = calling if calling is not None and calls[calling] else None
    return StageEvents(tuple(stages), which, thread, start, end, depth, calling, tuple(line for _, line in threads))


_CALL: Final = re.compile(r"PjitFunction|\w+LoadedExecutable::Execute")
_TRANSFER: Final = re.compile(r"DevicePut|shard_args|BufferFromHost|TransferTo|\w+::LinearizeInto")
_GRAIN: Final = re.compile(r"_?(\w+?)(?:Map|Iter)?Dataset(?:Iterator)?\((.*)\)", re.DOTALL)


def _threads(space: Space) -> Iterator[tuple[Plane, Line]]:
    """Yields the threads that run Python, without XLA's pools, which run operations."""
    for plane in space.planes:
        if plane.name == "/host:CPU":
            yield from ((plane, line) for line in plane.lines if not line.name.startswith("tf_"))


def _stages(plane: Plane, line: Line, annotation: str) -> list[Stage | None]:
    """Returns the stage of each event of a thread, None for other events."""
    events = line.events
    keys = np.stack(
        [events.metadata, *(events.stats[f"_ipl_{name}"] for name in ("stage_name", "stage_cat", "dataset_name"))]
    )
    # A trace has millions of events but few kinds, so texts are parsed once per kind.
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    found = [_stage(plane, annotation, *key) for key in distinct.T.tolist()]
    return [found[row] for row in inverse.reshape(-1).tolist()]


def _stage(plane: Plane, annotation: str, event: int, name: int, kind: int, dataset: int) -> Stage | None:
    if kind != MISSING:
        # A prefetch thread works on the preceding stage, which `dataset_name` names.
        text = plane.text(name if dataset == MISSING else dataset)
        match = _GRAIN.fullmatch(text)
        return Stage(match[1], plane.text(kind), match[2]) if match else Stage(text, plane.text(kind), "")
    text = plane.event_names.get(event, "")
    if text == annotation:
        return Stage(text, "annotation", "")
    return Stage(text, "transfer", "") if _TRANSFER.match(text) else None
