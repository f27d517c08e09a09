"""Clocks of hosts are compared by collectives, whose executions are the same on all hosts."""

import dataclasses

import numpy as np
import pytest
from jax._src.lib import hlo

from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

SECOND = 10**12
TRANSFER_US = 20


def listed(groups):
    """Two devices of each host, as replica groups."""
    devices = ([str(2 * host + device) for host in group for device in range(2)] for group in groups)
    return "{" + ",".join("{" + ",".join(each) + "}" for each in devices) + "}"


def program(first, second, hosts):
    """A program of a product, and of sums over two lists of groups of hosts."""
    return f"""HloModule jit_step, is_scheduled=true, num_partitions={2 * hosts}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {{
  %x = f32[64,64]{{1,0}} parameter(0)
  %dot.1 = f32[64,64]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %all-reduce.2 = f32[64,64]{{1,0}} all-reduce(%dot.1), replica_groups={listed(first)}, channel_id=1, use_global_device_ids=true, to_apply=%add
  ROOT %all-reduce.3 = f32[64,64]{{1,0}} all-reduce(%all-reduce.2), replica_groups={listed(second)}, channel_id=2, use_global_device_ids=true, to_apply=%add
}}
"""  # noqa: E501 - a line of HLO is a line


def formation(build, arrivals, *, clocks=(0, 0), begins=0, first=None, second=None, drift=0.0, regular=False):
    """A trace of hosts with two devices each, which sum over all hosts and then within each host in each run.

    Args:
      arrivals: microseconds from the beginning of a run until each host takes part, [runs, hosts].
      clocks: microseconds by which the clock of each host is ahead.
      begins: first run in the capture of the last host.
      first, second: other groups of hosts of both sums.
      drift: growth of the last clock's lead.
      regular: whether runs last equally long.
    """
    rng, hosts = np.random.default_rng(1), len(clocks)
    sums = {
        "all-reduce.2": first or [tuple(range(hosts))],
        "all-reduce.3": second or [(host,) for host in range(hosts)],
    }
    module = hlo.hlo_module_from_text(program(*sums.values(), hosts))
    proto = build.message((1, module.as_serialized_hlo_module_proto()))
    planes = [build.plane("/host:CPU") for _ in range(hosts)]
    events = [[] for _ in range(hosts)]

    def add(host, run, name, start, stop):
        ahead = clocks[host] + (drift * start if host == hosts - 1 else 0)
        about = {"hlo_op": name, "hlo_module": "jit_step", "program_id": 7 + host, "run_id": 1000 * (host + 1) + run}
        for device in range(2) if host < hosts - 1 or run >= begins else ():
            place = round(start + ahead), round(stop - start)
            events[host].append(planes[host].event(name, *place, device_ordinal=device, **about))

    begin = 1_000_000
    for run, offsets in enumerate(np.asarray(arrivals)):
        now = [begin + int(offset) for offset in offsets]
        for host in range(hosts):
            add(host, run, "dot.1", begin, now[host])
        for name, groups in sums.items():
            ends = {host: max(now[each] for each in group) + TRANSFER_US for group in groups for host in group}
            for host, end in ends.items():
                stop = end + int(rng.integers(0, 4))
                add(host, run, name, now[host], stop)
                now[host] = stop + 300 * host
        begin += 200_000 if regular else 200_000 + int(rng.integers(0, 40_000))
    for plane, each in zip(planes, events, strict=True):
        plane.line("worker", *each)
    spaces = [
        read_space(build.space(plane, build.metadata_plane([("jit_step", 7 + host, proto)]), host=f"host{host}"))
        for host, plane in enumerate(planes)
    ]
    abouts = [{"devices": 2 * hosts, "process": [host, hosts]} for host in range(hosts)]
    return trace_of(spaces, about=abouts[0], abouts=abouts)


def arrivals(runs=12, hosts=2):
    return np.random.default_rng(0).integers(100, 2_000, (runs, hosts))


@pytest.mark.parametrize(("ahead_us", "late"), [(250_000, 0), (-250_000, 2), (90_000_000, 1)])
def test_a_shifted_clock_is_recovered_within_its_error_and_corrected(build, ahead_us, late):
    trace = formation(build, arrivals(), clocks=(0, ahead_us), begins=late)
    clock = trace.clocks[1]
    assert clock.is_moved and not clock.is_regular
    assert abs(clock.offset_s - ahead_us * 1e-6) <= clock.error_s <= 2e-6 * TRANSFER_US
    (sums,) = trace.formation.meetings
    assert (sums.operation.name, sums.hosts, sums.start_ps.shape) == ("all-reduce.2", (0, 1), (2, 12 - late))
    assert np.ptp(sums.end_ps, axis=0).max() <= 2 * clock.error_s * SECOND
    expected = arrivals()[late:].T
    assert np.allclose(np.diff(sums.start_ps, axis=0), np.diff(expected, axis=0) * 10**6, atol=clock.error_s * SECOND)
    # Threads move with the devices.
    (line,) = trace.spaces[1].planes[0].lines
    moved = np.sort(line.events.start_ps(trace.base_ns))
    assert np.abs(moved[::2] - np.sort(trace.devices[2].start_ps)).max() <= 1000


def test_clocks_that_agree_are_not_moved(build):
    trace = formation(build, arrivals(), clocks=(0, 0))
    assert not trace.clocks[1].is_moved and abs(trace.clocks[1].offset_s) <= trace.clocks[1].error_s
    assert (trace.clocks[0].offset_s, trace.clocks[0].is_moved) == (0.0, False)


def test_a_drifting_clock_is_straightened(build):
    trace = formation(build, arrivals(120), clocks=(0, 3_000), drift=1e-4)
    assert trace.clocks[1].drift_s == pytest.approx(1e-4, rel=0.02)
    (sums,) = trace.formation.meetings
    assert np.ptp(sums.end_ps, axis=0).max() <= 2 * trace.clocks[1].error_s * SECOND


def test_a_host_is_compared_through_another_one_with_the_sum_of_the_errors(build):
    clocks = (0, 70_000, -40_000)
    together = formation(build, arrivals(hosts=3), clocks=clocks)
    assert [round(clock.offset_s, 4) for clock in together.clocks] == [0.0, 0.07, -0.04]
    through = formation(build, arrivals(hosts=3), clocks=clocks, first=[(0, 1), (2,)], second=[(0,), (1, 2)])
    assert [round(clock.offset_s, 4) for clock in through.clocks] == [0.0, 0.07, -0.04]
    assert through.clocks[2].error_s > 1.5 * through.clocks[1].error_s
    assert [each.hosts for each in through.formation.meetings] == [(0, 1), (1, 2)]
    alone = formation(build, arrivals(hosts=3), clocks=clocks, first=[(0, 1), (2,)])
    assert [clock.is_moved for clock in alone.clocks] == [False, True, False] and alone.clocks[2].offset_s is None


def test_runs_of_one_length_leave_the_number_of_runs_open(build):
    trace = formation(build, np.full((12, 2), 100), clocks=(0, 10_000), regular=True)
    assert trace.clocks[1].is_regular
    assert abs(trace.clocks[1].offset_s - 0.01) <= trace.clocks[1].error_s


def test_a_process_whose_rank_is_not_its_place_meets_the_right_ones(build):
    """Of a mesh that records its processes, groups are of other hosts than by the order of the files."""
    trace = formation(build, arrivals(hosts=4), clocks=(0,) * 4, first=[(0, 1), (2, 3)])
    assert {each.hosts for each in trace.formation.meetings} == {(0, 1), (2, 3)}
    mesh = {"meshes": [{"data": 8}], "mesh_processes": [[0, 0, 2, 2, 1, 1, 3, 3]]}
    abouts = [{**about, **mesh} for about in trace.abouts]
    swapped = dataclasses.replace(trace, abouts=tuple(abouts))
    assert {each.hosts for each in swapped.formation.meetings} == {(0, 2), (1, 3)}
