"""Lanes of sampled Python stacks, garbage collections, and waits for the interpreter.

A lane of stacks is a flame chart: a row for each depth of the stack, in which a sample lasts until the next one.
Adjacent frames of one library are one row if the stack has lines of the user. Rows that all samples of the thread
share are left out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stack_profile.report.lanes import AddKinds, Lane
from stack_profile.traces.host_stacks import HostStacks
from stack_profile.traces.instructions import Frame
from stack_profile.traces.intervals import self_times, tracks
from stack_profile.traces.short_paths import ShortPaths

__all__ = ["StackLanes"]


@dataclass(frozen=True)
class StackLanes:
    """Builds the lanes of one process.

    Attributes:
      stacks: samples of the process.
      group: name of the host.
      add: adds kinds of events.
      add_stack: adds a stack, innermost frame first, and returns its index.
      paths: short names of files.
    """

    stacks: HostStacks
    group: str
    add: AddKinds
    add_stack: Callable[[tuple[Frame, ...]], int]
    paths: ShortPaths

    def thread(self, thread: int) -> Lane | None:
        """Returns the lane of a thread; None without samples, and for the profiler's own threads."""
        runs = self.stacks.runs[self.stacks.runs[:, 0] == thread]
        about = self.stacks.threads[thread]
        if not len(runs) or about.own:
            return None
        rows = {stack: _rows(self.stacks.stacks[stack]) for stack in np.unique(runs[:, 1]).tolist()}
        shared = min(_common(list(rows.values())), *(len(each) - 1 for each in rows.values()))
        events, nodes = self._events(runs.tolist(), {stack: each[shared:] for stack, each in rows.items()})
        outermost = tuple(itertools.chain.from_iterable(next(iter(rows.values()))[:shared]))
        first = self.add([self._kind(about.name, path, outermost) for path in nodes])
        start, end, depth, node = np.array(sorted(events, key=lambda event: (event[0], event[2])), np.int64).T
        columns = (start, end - start, self_times(start, end, depth), first + node, depth)
        return Lane(self.group, f"{about.name} stacks", "stacks", int(depth.max()) + 1, *columns)

    def _events(
        self, runs: Sequence[Sequence[int]], rows: dict[int, Sequence["_Row"]]
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple["_Row", ...]]]:
        """Returns events (start, end, depth, node), and the path of each node, outermost row first."""
        ticks = self.stacks.tick_ps
        last_ps = int(ticks[-1]) + (int(np.median(np.diff(ticks))) if len(ticks) > 1 else 1)
        edges = [*ticks.tolist(), last_ps]
        nodes: dict[tuple[_Row, ...], int] = {}
        events: list[tuple[int, int, int, int]] = []
        path: tuple[_Row, ...] = ()
        starts: list[int] = []
        end = -1

        def close(depth: int) -> None:
            events.extend(
                (starts.pop(), edges[end], each, nodes.setdefault(path[: each + 1], len(nodes)))
                for each in range(len(path) - 1, depth - 1, -1)
            )

        for _, stack, first, last in runs:
            found = tuple(rows[stack])
            kept = _common([path, found]) if first == end else 0
            close(kept)
            starts += [edges[first]] * (len(found) - kept)
            path, end = found, last + 1
        close(0)
        return events, list(nodes)

    def _kind(self, thread: str, path: tuple["_Row", ...], outermost: tuple[Frame, ...]) -> dict[str, object]:
        innermost = path[-1][-1]
        frames = (*outermost, *itertools.chain.from_iterable(path))
        kind: dict[str, object] = {
            "type": "sample",
            "name": f"{innermost.package}: {innermost.function}" if innermost.package else innermost.function,
            "module": thread,
            "category": "Python of packages" if innermost.package else "Python",
            "stack": self.add_stack(tuple(reversed(frames))),
            "outer": len(outermost),
        }
        if innermost.package:
            kind["package_line"] = f"{self.paths.frame(innermost)}:{innermost.line}"
        own = next((frame for frame in reversed(frames) if not frame.package), None)
        if own is not None:
            file = self.paths.frame(own)
            kind |= {"line": f"{file}:{own.line}", "file": file}
        return kind

    def collections(self) -> Lane | None:
        """Returns the lane of garbage collections; None without any."""
        pauses = self.stacks.pauses
        if not len(pauses.start_ps):
            return None
        generations, which = np.unique(pauses.generation, return_inverse=True)
        about = {"type": "gc", "category": "garbage collection"}
        first = self.add([{**about, "name": f"generation {each}"} for each in generations.tolist()])
        order = np.argsort(pauses.start_ps, kind="stable")
        start, end = pauses.start_ps[order], pauses.end_ps[order]
        row = tracks(start, end)
        length = end - start
        columns = (start, length, length.astype(float), first + which.reshape(-1)[order], row)
        return Lane(self.group, "garbage collection", "gc", int(row.max()) + 1, *columns)

    def waits(self) -> Lane | None:
        """Returns the lane of the sampling thread's long waits: for the interpreter lock, and below for a processor."""
        lateness = self.stacks.lateness
        if lateness is None:
            return None
        queued = lateness.processor_ps
        names = ("interpreter lock", "processor") if queued is not None else ("interpreter lock or a processor",)
        waits = [lateness.interpreter_ps, *([queued] if queued is not None else [])]
        found = [np.flatnonzero(each > _LONG_WAIT_PS) for each in waits]
        row = np.repeat(np.arange(len(waits)), [len(each) for each in found])
        if not len(row):
            return None
        about = {"type": "gc", "category": "wait of the sampling thread"}
        first = self.add([{**about, "name": f"waits for the {name}"} for name in names])
        length = np.concatenate([each[rows] for each, rows in zip(waits, found, strict=True)])
        start = self.stacks.tick_ps[np.concatenate(found)] - length
        order = np.argsort(start, kind="stable")
        start, length, row = start[order], length[order], row[order]
        columns = (start, length, length.astype(float), first + row, row)
        return Lane(self.group, "waits for the interpreter", "gc", len(waits), *columns)

    def threads(self, seen: set[int]) -> Iterator[Lane]:
        """Yields the lanes of all threads but some."""
        lanes = (self.thread(thread) for thread in range(len(self.stacks.threads)) if thread not in seen)
        yield from (lane for lane in lanes if lane is not None)


# A thread that runs Python hands over the lock after 2 ms (`captures.stacks`), so shorter waits are everywhere.
_LONG_WAIT_PS: Final = 4_000_000_000
_Row = tuple[Frame, ...]  # frames of a row, outermost first: one, or several of a library


def _rows(stack: Sequence[Frame]) -> list[_Row]:
    """Returns the rows of a stack, outermost first."""
    frames = stack[::-1]
    if all(frame.package for frame in frames):
        return [(frame,) for frame in frames]
    groups = itertools.groupby(enumerate(frames), lambda item: item[1].package or item[0])
    return [tuple(frame for _, frame in group) for _, group in groups]


def _common(paths: Sequence[Sequence[_Row]]) -> int:
    """Returns the length of the longest common prefix."""
    columns = enumerate(zip(*paths, strict=False))
    return next((place for place, column in columns if len(set(column)) > 1), min(map(len, paths)))
