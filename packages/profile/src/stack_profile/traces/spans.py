"""Splits a device's time into consecutive spans with readable names.

Each instant is idle or belongs to the latest operation that has started by then and still runs, so the duration of a
span is its busy plus its idle time. Neighbors with the same key (layer, pass of training and trip of a loop) form one
span. If that gives more spans than requested, names are shortened from their inner end, and then the smallest spans
join the neighbor with the most similar key.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from stack_profile.traces.categories import category
from stack_profile.traces.hlo import Program
from stack_profile.traces.instructions import Frame, Instruction
from stack_profile.traces.intervals import gaps, union
from stack_profile.traces.operations import Operation, Ops

__all__ = ["IDLE", "Items", "Key", "cut", "items_of", "places_of"]


@dataclass(frozen=True)
class Key:
    """Properties that the neighbours in one span share.

    Attributes:
      path: name of the span, its outermost part first.
      direction: pass of training; None if unknown.
      trip: trip of the outermost loop, counted from 1; 0 outside of loops, or if unknown.
    """

    path: tuple[str, ...]
    direction: str | None
    trip: int

    def likeness(self, other: "Key") -> int:
        return 2 * _alike([self.path, other.path]) + (self.direction == other.direction)


IDLE: Final = Key((), None, 0)


@dataclass(frozen=True)
class Items:
    """Consecutive pieces of a window, one per row; together they cover the window.

    Attributes:
      keys: the distinct keys; the first is `IDLE`.
      key: index of the piece's key in `keys`.
      operation: index of its operation among the device's, -1 if idle.
      start_ps, end_ps: edges of the piece.
      executions_ps: sorted start times of the executions in the window, loops and calls excluded.
    """

    keys: tuple[Key, ...]
    key: np.ndarray
    operation: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    executions_ps: np.ndarray

    @property
    def size_ps(self) -> np.ndarray:
        return (self.end_ps - self.start_ps).astype(float)


def items_of(ops: Ops, start_ps: int, end_ps: int) -> Items:
    """Returns the pieces of a device's time between two instants."""
    rows = np.flatnonzero((ops.end_ps > start_ps) & (ops.start_ps < end_ps))
    which, start, end = ops.which[rows], ops.start_ps[rows].clip(start_ps), ops.end_ps[rows].clip(max=end_ps)
    is_outer = np.array([each.is_container or each.beside for each in ops.operations], bool)[which]
    work, idle = np.flatnonzero(~is_outer), gaps(union(start, end), start_ps, end_ps)
    owner, pieces = _latest_started(start[work], end[work])
    owner = work[owner]
    # Loops and calls own the time in which none of their operations runs.
    rest = gaps(union(*np.concatenate([pieces, idle]).T), start_ps, end_ps)
    holder = np.full(len(rest), -1)
    for row in np.flatnonzero(is_outer):  # in order of their start: the innermost is assigned last
        holder[slice(*np.searchsorted(rest[:, 0], (start[row], end[row])))] = which[row]
    trips = np.zeros(len(which), np.int64)
    trips[work] = _trips(ops, which[work])
    operation = np.concatenate([which[owner], holder, np.full(len(idle), -1)])
    trip = np.concatenate([trips[owner], np.zeros(len(rest) + len(idle), np.int64)])
    begins, ends = np.concatenate([pieces, rest, idle]).T
    keys, key = _keys(ops, operation, trip)
    order = np.argsort(begins, kind="stable")
    return Items(keys, key[order], operation[order], begins[order], ends[order], np.sort(start[work]))


def _latest_started(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the union of intervals into disjoint pieces, each owned by the interval around it that starts last.

    Of operations that run side by side, the one that starts last is usually the shortest: on CPUs an operation may be
    marked as finished long after its work.

    Returns:
      The row of the interval that owns each piece, and the pieces, int64[pieces, 2].
    """
    order, times = np.argsort(start, kind="stable").tolist(), np.unique(np.concatenate([start, end])).tolist()
    starts, ends = start.tolist(), end.tolist()
    running: list[tuple[int, int]] = []  # a heap of (negative start, row)
    owners: list[int] = []
    pieces: list[tuple[int, int]] = []
    started = 0
    for begin, until in pairwise(times):
        while started < len(order) and starts[order[started]] <= begin:
            row = order[started]
            heapq.heappush(running, (-starts[row], row))
            started += 1
        while running and ends[running[0][1]] <= begin:
            heapq.heappop(running)
        if not running:
            continue
        row = running[0][1]
        if owners and owners[-1] == row and pieces[-1][1] == begin:
            pieces[-1] = (pieces[-1][0], until)
        else:
            owners.append(row)
            pieces.append((begin, until))
    return np.array(owners, np.int64), np.array(pieces, np.int64).reshape(-1, 2)


def cut(items: Items, limit: int) -> list[int]:
    """Returns the index of the first item of each span, for at most `limit` spans."""
    spans: list[_Span] = []
    window_ps = float(items.size_ps.sum())
    for depth in range(max((len(key.path) for key in items.keys), default=1) or 1, 0, -1):
        keys = [replace(key, path=key.path[:depth]) for key in items.keys]
        columns = zip(items.size_ps.tolist(), items.key.tolist(), strict=True)
        spans = [_Span(first, size, keys[key]) for first, (size, key) in enumerate(columns)]
        for share in _SPECKS:
            spans = _merged(spans, share * window_ps)
        if len(spans) <= limit:
            break
    share = _SPECKS[-1]
    # Ends at the latest when a single span remains.
    while len(spans) > limit:
        share *= 1.5
        spans = _merged(spans, share * window_ps)
    return [span.first for span in spans]


_SPECKS: Final = (0.0, 1e-4, 5e-4, 2e-3, 5e-3)  # shares of the window: ever larger specks join a neighbour


@dataclass(frozen=True)
class _Span:
    """Consecutive items starting at `first`."""

    first: int
    size_ps: float
    key: Key


def _merged(spans: Sequence[_Span], min_ps: float) -> list[_Span]:
    """Joins neighbours with equal keys, and spans smaller than `min_ps` with the more similar neighbour."""
    merged: list[_Span] = []
    held = 0.0, -1  # size and first item of a small span that joins the following one
    for place, given in enumerate(spans):
        span = given if held[1] < 0 else _Span(held[1], held[0] + given.size_ps, given.key)
        held = 0.0, -1
        last = merged[-1] if merged else None
        following = spans[place + 1].key.likeness(span.key) if place + 1 < len(spans) else -1
        small = span.size_ps < min_ps
        if last and (last.key == span.key or (small and last.key.likeness(span.key) >= following)):
            merged[-1] = _Span(last.first, last.size_ps + span.size_ps, last.key)
        elif small and following >= 0:
            held = span.size_ps, span.first
        else:
            merged.append(span)
    return merged


def _keys(ops: Ops, operation: np.ndarray, trips: np.ndarray) -> tuple[tuple[Key, ...], np.ndarray]:
    """Returns the distinct keys, and the index of each piece's key.

    Args:
      operation: index of each piece's operation, -1 if idle.
      trips: the trip of the outermost loop that each piece is in, 0 outside of loops.
    """
    keys = {IDLE: 0}
    places = places_of(ops.operations)
    found = []
    for row, trip in zip(operation.tolist(), trips.tolist(), strict=True):
        path, direction = places[row]
        found.append(keys.setdefault(Key(path, direction, trip), len(keys)) if row >= 0 else 0)
    return tuple(keys), np.array(found, np.int64)


def places_of(operations: Sequence[Operation]) -> list[tuple[tuple[str, ...], str | None]]:
    """Returns the path of each operation, its layer or else a function, and its pass.

    The function is the first on the stack that differs between the program's operations without a layer. In training,
    the operations inside the differentiated function are compared separately from those outside.
    """
    stacks: dict[tuple[int, bool], list[tuple[str, ...]]] = {}
    for each in operations:
        if each.instruction is not None and not each.instruction.layer and each.instruction.frames:
            stacks.setdefault(_kin(each, each.instruction), []).append(_functions(each.instruction.frames))
    shared = {kin: _alike(found) for kin, found in stacks.items()}
    found: list[tuple[tuple[str, ...], str | None]] = []
    for each in operations:
        instruction = each.instruction
        if instruction is None:
            found.append(((each.module or each.name,), None))
            continue
        path = tuple(instruction.layer.split("/")) if instruction.layer else (category(instruction),)
        if not instruction.layer and instruction.frames:
            functions = _functions(instruction.frames)
            path = (functions[min(shared[_kin(each, instruction)], len(functions) - 1)],)
        found.append((path, instruction.scope.direction))
    return found


def _kin(operation: Operation, instruction: Instruction) -> tuple[int, bool]:
    return id(operation.program), "jvp(" in instruction.op_name


def _functions(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Returns the functions of a stack, outermost first."""
    return tuple(frame.function.replace(".<locals>", "") for frame in reversed(frames))


def _alike(paths: Sequence[Sequence[str]]) -> int:
    """Returns the length of the paths' common prefix."""
    columns = enumerate(zip(*paths, strict=False))
    return next((place for place, parts in columns if len(set(parts)) > 1), min(map(len, paths)))


def _trips(ops: Ops, executed: np.ndarray) -> np.ndarray:
    """Returns the trip of the outermost loop that each execution is in, from 1 on; 0 outside of loops or if unknown."""
    programs = {id(each.program): each.program for each in ops.operations if each.program is not None}
    loops = {key: dict(_loops(program)) for key, program in programs.items()}
    trips = np.zeros(len(executed), np.int64)
    for row in np.unique(executed).tolist():
        operation = ops.operations[row]
        times, outermost = loops.get(id(operation.program), {}).get(operation.name.removeprefix("%"), (0, 0))
        mine = np.flatnonzero(executed == row)
        # Otherwise the capture cut off some executions, so the numbers of trips are unknown.
        if len(mine) == times:
            trips[mine] = 1 + np.arange(times) * outermost // times
    return trips


def _loops(program: Program) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields each instruction in a loop with its number of executions and the trip count of the outermost loop."""
    found = program.module.executions() if program.module else ()
    executions = [each for each in found if not each.fused and each.loops]
    trips = {each.loops[0]: each.times for each in executions if len(each.loops) == 1}
    for each in executions:
        yield each.instruction.name, (each.times, trips[each.loops[0]])
