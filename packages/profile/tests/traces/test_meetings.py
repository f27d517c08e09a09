"""Clocks of hosts are compared by collectives, whose executions are the same on all hosts."""

import dataclasses

import numpy as np
import pytest

from stack_profile.traces.meetings import _shift

SECOND = 10**12
TRANSFER_US = 20


def arrivals(runs=12, hosts=2):
    return np.random.default_rng(0).integers(100, 2_000, (runs, hosts))


@pytest.mark.parametrize(("ahead_us", "late"), [(250_000, 0), (-250_000, 2), (90_000_000, 1)])
def test_a_shifted_clock_is_recovered_within_its_error_and_corrected(formation, ahead_us, late):
    trace = formation(arrivals(), clocks=(0, ahead_us), begins=late)
    clock = trace.clocks[1]
    assert clock.is_moved and not clock.is_regular
    assert abs(clock.offset_s - ahead_us * 1e-6) <= clock.error_s <= 2e-6 * TRANSFER_US
    (sums,) = trace.formation.meetings
    assert (sums.operation.name, sums.hosts, sums.start_ps.shape) == ("all-reduce.2", (0, 1), (2, 12 - late))
    assert np.ptp(sums.end_ps, axis=0).max() <= 2 * clock.error_s * SECOND
    expected = arrivals()[late:].T
    assert np.allclose(np.diff(sums.start_ps, axis=0), np.diff(expected, axis=0) * 10**6, atol=clock.error_s * SECOND)
    # Threads move with the devices.
    line, _ = trace.spaces[1].planes[0].lines
    moved = np.sort(line.events.start_ps(trace.base_ns))
    assert np.abs(moved[::2] - np.sort(trace.devices[2].start_ps)).max() <= 1000


def test_clocks_that_agree_are_not_moved(formation):
    trace = formation(arrivals(), clocks=(0, 0))
    assert not trace.clocks[1].is_moved and abs(trace.clocks[1].offset_s) <= trace.clocks[1].error_s
    assert (trace.clocks[0].offset_s, trace.clocks[0].is_moved) == (0.0, False)


def test_a_drifting_clock_is_straightened(formation):
    trace = formation(arrivals(120), clocks=(0, 3_000), drift=1e-4)
    assert trace.clocks[1].drift_s == pytest.approx(1e-4, rel=0.02)
    (sums,) = trace.formation.meetings
    assert np.ptp(sums.end_ps, axis=0).max() <= 2 * trace.clocks[1].error_s * SECOND


def test_a_host_is_compared_through_another_one_with_the_sum_of_the_errors(formation):
    clocks = (0, 70_000, -40_000)
    together = formation(arrivals(hosts=3), clocks=clocks)
    assert [round(clock.offset_s, 4) for clock in together.clocks] == [0.0, 0.07, -0.04]
    through = formation(arrivals(hosts=3), clocks=clocks, first=[(0, 1), (2,)], second=[(0,), (1, 2)])
    assert [round(clock.offset_s, 4) for clock in through.clocks] == [0.0, 0.07, -0.04]
    assert through.clocks[2].error_s > 1.5 * through.clocks[1].error_s
    assert [each.hosts for each in through.formation.meetings] == [(0, 1), (1, 2)]
    alone = formation(arrivals(hosts=3), clocks=clocks, first=[(0, 1), (2,)])
    assert [clock.is_moved for clock in alone.clocks] == [False, True, False] and alone.clocks[2].offset_s is None


def test_runs_of_one_length_leave_the_number_of_runs_open(formation):
    trace = formation(np.full((12, 2), 100), clocks=(0, 10_000), regular=True)
    assert trace.clocks[1].is_regular
    assert abs(trace.clocks[1].offset_s - 0.01) <= trace.clocks[1].error_s


@pytest.mark.parametrize(("runs", "expected"), [(4, (0, True)), (16, (0, False))])
def test_a_late_end_does_not_make_another_match_of_a_few_runs_better(runs, expected):
    """Of four runs every 20 ms, two match exactly if they are shifted by two; the first host's third one ends late."""
    random = np.random.default_rng(0)
    starts = np.arange(runs) * 20e9 + (random.integers(0, 10**9, runs) if runs > 4 else 0)
    first, second = (np.stack([starts, starts + 1e8], axis=-1)[:, None] for _ in range(2))
    first[2, 0, 1] += 5e8
    shift, _, is_regular = _shift([(first, second)], None)
    assert (shift, is_regular) == expected


def test_a_process_whose_rank_is_not_its_place_meets_the_right_ones(formation):
    """Of a mesh that records its processes, groups are of other hosts than by the order of the files."""
    trace = formation(arrivals(hosts=4), clocks=(0,) * 4, first=[(0, 1), (2, 3)])
    assert {each.hosts for each in trace.formation.meetings} == {(0, 1), (2, 3)}
    mesh = {"meshes": [{"data": 8}], "mesh_processes": [[0, 0, 2, 2, 1, 1, 3, 3]]}
    abouts = [{**about, **mesh} for about in trace.abouts]
    swapped = dataclasses.replace(trace, abouts=tuple(abouts))
    assert {each.hosts for each in swapped.formation.meetings} == {(0, 2), (1, 3)}
