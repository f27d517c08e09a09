"""Interval arithmetic: unions, gaps, and self times of overlapping operations.

Operations overlap on several threads or streams of a device, and a loop's event spans the events of its body. Each
instant belongs to the operations running at that time that run no others, in equal shares. The self times of all
operations therefore sum to the union, the time in which any of them ran.
"""

import heapq

import numpy as np

__all__ = ["difference", "gaps", "intersection", "nesting", "overlap", "self_times", "tracks", "union"]


def union(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the union of intervals as disjoint rows (start, end) in order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if not len(starts):
        return np.zeros((0, 2), np.int64)
    reached = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], reached[last]], axis=1)


def gaps(covered: np.ndarray, start: int, end: int) -> np.ndarray:
    """Returns the parts of [start, end] outside of the disjoint rows of `covered`, as rows (start, end)."""
    edges = np.concatenate([[start], np.clip(covered, start, end).reshape(-1), [end]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the times in both sets of disjoint rows (start, end), as disjoint rows in order."""
    return _pieces(first, second, is_in_second=True)


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the times in the disjoint rows of `first` but not in those of `second`, as disjoint rows in order."""
    return _pieces(first, second, is_in_second=False)


def _pieces(first: np.ndarray, second: np.ndarray, *, is_in_second: bool) -> np.ndarray:
    edges = np.unique(np.concatenate([first.reshape(-1), second.reshape(-1)]))
    inside, other = (_open(rows[:, 0], rows[:, 1], edges) > 0 for rows in (first, second))
    kept = np.flatnonzero(inside & (other == is_in_second))
    return union(edges[kept], edges[kept + 1])


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Computes how much of each row (start, end) of `first` is covered by `second`, disjoint rows in order of time."""
    if not len(second):
        return np.zeros(len(first), np.int64)
    before = np.concatenate([[0], np.cumsum(second[:, 1] - second[:, 0])])

    # Covered time before an instant: complete intervals, and a part of the latest.
    def until(time: np.ndarray) -> np.ndarray:
        place = np.searchsorted(second[:, 0], time, "right")
        # Keeps the index valid; `where` discards these rows.
        last = np.maximum(place - 1, 0)
        return np.where(place > 0, before[last] + np.minimum(time, second[last, 1]) - second[last, 0], 0)

    return until(first[:, 1]) - until(first[:, 0])


def self_times(starts: np.ndarray, ends: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Computes the share of each interval in the union of all, float64.

    Args:
      starts, ends: edges of the intervals.
      depth: -1 for operations that run no others, otherwise the nesting depth. If no operation of depth -1 runs at an
        instant, the instant belongs to the innermost interval.
    """
    shares = np.zeros(len(starts))
    covered = np.zeros((0, 2), np.int64)
    # Innermost first, so outer operations get only the remaining time.
    for level in (-1, *range(int(depth.max(initial=-1)), -1, -1)):
        rows = np.flatnonzero(depth == level)
        if len(rows):
            shares[rows] = _shares(starts[rows], ends[rows], covered)
            covered = union(np.concatenate([covered[:, 0], starts[rows]]), np.concatenate([covered[:, 1], ends[rows]]))
    return shares


def nesting(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns how many intervals contain each one; of two equal intervals, the earlier row contains the later."""
    depth = np.zeros(len(starts), np.int64)
    open_: list[int] = []
    # With equal starts the longer interval comes first, because it contains the shorter.
    for row in np.lexsort((-ends, starts)).tolist():
        while open_ and ends[open_[-1]] <= starts[row]:
            open_.pop()
        depth[row] = len(open_)
        open_.append(row)
    return depth


def _shares(starts: np.ndarray, ends: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Returns each interval's share of the time outside of `excluded`, divided equally where intervals overlap."""
    # Most operations run without overlap and need no sweep.
    alone = np.zeros(len(starts), bool) if len(excluded) else _isolated(starts, ends)
    shares = (ends - starts).astype(float)
    shares[~alone] = _divided(starts[~alone], ends[~alone], excluded)
    return shares


def _isolated(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the mask of intervals that overlap no other."""
    order = np.argsort(starts, kind="stable")
    reached = np.maximum.accumulate(ends[order])
    free = starts[order][1:] >= reached[:-1]
    alone = np.zeros(len(starts), bool)
    alone[order] = np.append(True, free) & np.append(free, True)
    return alone


def _divided(starts: np.ndarray, ends: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Computes `_shares` for overlapping intervals."""
    edges = np.sort(np.concatenate([starts, ends, excluded.reshape(-1)]))
    running, blocked = _open(starts, ends, edges), _open(excluded[:, 0], excluded[:, 1], edges)
    weight = np.where((blocked == 0) & (running > 0), np.diff(edges, append=edges[-1:]) / np.maximum(running, 1), 0.0)
    # Prefix sums make the share of an interval a difference of two numbers.
    before = np.concatenate([[0.0], np.cumsum(weight)])
    return before[np.searchsorted(edges, ends)] - before[np.searchsorted(edges, starts)]


def _open(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the number of intervals that contain the time after each edge."""
    return np.searchsorted(np.sort(starts), edges, "right") - np.searchsorted(np.sort(ends), edges, "right")


def tracks(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Assigns each interval, in order of their starts, to the lowest-numbered track that is free."""
    places = np.zeros(len(starts), np.int64)
    free: list[int] = []
    # A heap of busy tracks by their end; `free` is a heap of track numbers.
    open_: list[tuple[int, int]] = []
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while open_ and open_[0][0] <= start:
            heapq.heappush(free, heapq.heappop(open_)[1])
        places[row] = heapq.heappop(free) if free else len(open_)
        heapq.heappush(open_, (end, int(places[row])))
    return places
