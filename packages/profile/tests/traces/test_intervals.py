"""Self times share the union among what runs, whatever overlaps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stack_profile.traces.intervals import gaps, nesting, self_times, tracks, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()), max_size=12)


def columns(intervals):
    starts = np.array([start for start, _, _ in intervals], np.int64)
    ends = starts + np.array([length for _, length, _ in intervals], np.int64)
    outer = np.array([is_container for _, _, is_container in intervals], bool)
    depth = np.full(len(intervals), -1)
    depth[outer] = nesting(starts[outer], ends[outer])
    return starts, ends, depth


def by_instants(starts, ends, depth):
    """Self times, counted one unit of time at a time."""
    shares = np.zeros(len(starts))
    for instant in range(60):
        running = [row for row in range(len(starts)) if starts[row] <= instant < ends[row]]
        leaves = [row for row in running if depth[row] < 0]
        deepest = max((depth[row] for row in running), default=0)
        owners = leaves or [row for row in running if depth[row] == deepest]
        for row in owners:
            shares[row] += 1 / len(owners)
    return shares


@given(intervals=INTERVALS)
def test_each_instant_is_shared_by_what_runs_in_it_and_runs_no_others(intervals):
    starts, ends, depth = columns(intervals)
    shares = self_times(starts, ends, depth)
    np.testing.assert_allclose(shares, by_instants(starts, ends, depth), atol=1e-9)
    covered = union(starts, ends)
    np.testing.assert_allclose(shares.sum(), np.sum(covered[:, 1] - covered[:, 0]))


@given(intervals=INTERVALS)
def test_the_union_and_its_gaps_fill_a_span(intervals):
    starts, ends, _ = columns(intervals)
    covered = union(starts, ends)
    assert (covered[1:, 0] > covered[:-1, 1]).all()
    free = gaps(covered, 5, 45)
    inside = np.clip(covered, 5, 45)
    assert np.sum(inside[:, 1] - inside[:, 0]) + np.sum(free[:, 1] - free[:, 0]) == 40


def test_a_loop_has_the_time_in_which_its_body_does_not_run():
    starts, ends = np.array([0, 10, 30, 35]), np.array([100, 30, 40, 50])
    assert self_times(starts, ends, np.array([0, -1, -1, -1])).tolist() == [60, 20, 7.5, 12.5]


def test_nesting_counts_what_is_around():
    starts, ends = np.array([0, 5, 6, 20, 0]), np.array([30, 15, 9, 30, 2])
    assert nesting(starts, ends).tolist() == [0, 1, 2, 1, 1]


def test_tracks_are_taken_again_when_they_are_free():
    starts, ends = np.array([0, 1, 2, 5, 6, 9]), np.array([5, 2, 6, 7, 9, 10])
    assert tracks(starts, ends).tolist() == [0, 1, 1, 0, 1, 0]
