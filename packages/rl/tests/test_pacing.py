"""Pacing: how stale a group may get, that nothing is left out, and that short groups are not preferred."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_rl.pacing import Pacing


def simulated(groups, max_staleness, batches, durations):
    """Runs batches of groups that take `durations` beside steps that take 1; returns (group, dispatched, used)."""
    pacing, numbers, clock = Pacing(groups, max_staleness), itertools.count(), 0.0
    running, dispatched, used = [], {}, []
    for version in range(batches):
        for _ in range(pacing.admitted()):
            number = next(numbers)
            dispatched[number] = version
            pacing.dispatch(number, version)
            heapq.heappush(running, (clock + durations(number), number))
        assert len(pacing._batches) <= (max_staleness + 1) * groups
        while running and running[0][0] <= clock:
            pacing.complete(heapq.heappop(running)[1])
        while (found := pacing.ready(version)) is None:
            clock, number = heapq.heappop(running)
            pacing.complete(number)
        pacing.use(found)
        assert len(found) == groups == len(set(found)) and found == sorted(found)
        used += [(number, dispatched[number], version) for number in found]
        clock += 1.0
    return used, dispatched


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 5), staleness=st.integers(0, 4), seed=st.integers(0, 1000))
def test_nothing_becomes_too_stale_or_is_left_out_or_used_twice(groups, staleness, seed):
    times = np.random.default_rng(seed).pareto(1.0, 1000)
    used, dispatched = simulated(groups, staleness, 20, lambda number: times[number])
    assert all(version - began <= staleness for _, began, version in used)
    numbers = [number for number, _, _ in used]
    assert len(numbers) == len(set(numbers)) == 20 * groups
    due = {number for number, version in dispatched.items() if version <= 19 - staleness}
    assert due <= set(numbers)


def test_without_staleness_batches_are_in_the_order_of_dispatch():
    used, _ = simulated(4, 0, 10, lambda number: float(number % 7))
    assert [number for number, _, _ in used] == list(range(40))


@pytest.mark.parametrize("staleness", [1, 3])
def test_used_lengths_are_distributed_like_dispatched_ones(staleness):
    lengths = np.random.default_rng(0).lognormal(0.0, 1.5, 10_000)
    used, _ = simulated(8, staleness, 200, lambda number: lengths[number])
    ours, theirs = (np.sort(lengths[numbers]) for numbers in ([number for number, *_ in used], range(len(used))))
    places = np.concatenate([ours, theirs])
    distance = np.abs(np.searchsorted(ours, places, "right") - np.searchsorted(theirs, places, "right")) / len(ours)
    assert distance.max() <= (staleness + 1) * 8 / len(ours)  # those that are under way at the end, and no others
    # A batch of whatever comes first, which leaves slow groups behind for good, would be seen:
    first = np.sort(np.sort(lengths[: 2 * len(used)])[: len(used)])
    apart = np.abs(np.searchsorted(first, places, "right") - np.searchsorted(theirs, places, "right")) / len(ours)
    assert apart.max() > 0.2


def test_a_slow_group_is_overtaken_while_there_is_room_for_it_later():
    pacing = Pacing(groups=1, max_staleness=2)
    for number in range(pacing.admitted()):
        pacing.dispatch(number, 0)
    for number in (1, 2):
        pacing.complete(number)
    assert pacing.ready(0) == [1]
    pacing.use([1])
    pacing.dispatch(3, 1)
    pacing.complete(3)
    assert pacing.ready(1) == [2]  # 0 and 2 are due at 2, which has room for one of them
    pacing.use([2])
    assert pacing.ready(2) is None
    pacing.complete(0)
    assert pacing.ready(2) == [0]
