"""Formations, causes and what follows a failure: pure, without processes."""

import signal

import pytest

from stack_core.abi.errors import ClusterError
from stack_core.runtime.attribution import Failure, attributed
from stack_core.runtime.formation import Formation, Member, formed, mesh_sizes
from stack_core.runtime.supervisor import GiveUp, Restart, after

RESET = {"type": "TrainingError", "message": "Process 0 has lost another process", "mendable": True}
OWN = {"type": "DataError", "message": "the file is empty", "mendable": True}


def running(*changes):
    """Three ranks at steps 5, 5 and 5; `changes` are of each in turn."""
    members = [Member(rank, rank, "running", pid=100 + rank, step=5) for rank in range(3)]
    for member, change in zip(members, changes, strict=False):
        for name, value in change.items():
            setattr(member, name, value)
    return Formation(1, "127.0.0.1:1", members)


def dead(status=None, error=None, **more):
    return {"status": "dead", "exit_status": status, "error": error, **more}


def test_ranks_are_placed_on_the_lowest_free_hosts():
    assert formed(3, "a:1", {4, 1, 2}, 2).hosts == (1, 2)
    with pytest.raises(ClusterError, match=r"formation needs 4 hosts, but 2 are free \(hosts 0, 7\)"):
        formed(1, "a:1", {0, 7}, 4)


@pytest.mark.parametrize(
    ("axes", "devices", "processes", "sizes"),
    [
        ({"data": 4}, 4, 2, {"data": 4}),
        ({"data": 2}, 4, 2, None),  # every process must hold a part
        ({"data": 2}, 4, 1, {"data": 2}),
        ({"data": 8}, 4, 1, None),
        ({"data": 2, "tensor": -1}, 8, 2, {"data": 2, "tensor": 4}),
        ({"data": 3, "tensor": -1}, 8, 1, {"data": 3, "tensor": 2}),
        ({"data": 16, "tensor": -1}, 8, 1, None),
    ],
)
def test_a_mesh_has_all_devices_of_its_processes_or_the_first_ones_of_its_only_process(axes, devices, processes, sizes):
    assert mesh_sizes(axes, devices, processes=processes) == sizes


@pytest.mark.parametrize(
    ("changes", "lost", "expected"),
    [
        ([{}, dead(-signal.SIGKILL)], (), ("signal", 1, "SIGKILL")),
        ([dead(2, RESET), dead(-signal.SIGKILL)], (), ("signal", 1, "SIGKILL")),
        ([dead(-signal.SIGABRT), dead(-signal.SIGSEGV)], (), ("signal", 1, "SIGSEGV")),
        ([dead(-signal.SIGABRT), dead(2, RESET)], (), ("signal", 0, "SIGABRT")),
        ([dead(2, RESET), {}, dead(2, OWN)], (), ("error", 2, None)),
        ([dead(2, RESET), {}, {}], (), ("error", 0, None)),
        ([dead(-signal.SIGKILL), {}, {}], (2,), ("lost host", 2, None)),
        ([{}, {"stopped": True}], (), ("stopped", 1, "SIGSTOP")),
        ([dead(2, RESET), {"stopped": True}], (), ("stopped", 1, "SIGSTOP")),
        ([{}, dead(7)], (), ("exit", 1, None)),
    ],
)
def test_the_cause_is_told_from_its_casualties(changes, lost, expected):
    failure = attributed(running(*changes), lost_hosts=lost)
    assert (failure.kind, failure.rank, failure.signal) == expected
    assert failure.mendable == (failure.kind == "error" and changes[failure.rank]["error"] is OWN)


def test_a_hang_is_blamed_on_who_is_behind_and_on_nobody_when_all_are_alike():
    assert attributed(running({}, {"step": 4}), hangs_for_s=9.0).rank == 1
    failure = attributed(running(), hangs_for_s=9.0)
    assert failure.kind == "hang" and failure.rank is None and "9.0 s" in str(failure)


def fail(kind="signal", rank=0, step=5, signal="SIGSEGV", evidence="", **more):
    return Failure(kind, rank, rank, step, evidence, signal=signal, **more)


def test_a_step_that_fails_twice_alike_is_poison_and_other_failures_are_not():
    assert after([fail()], max_failures=5) == Restart()
    assert isinstance(after([fail(), fail()], max_failures=5), GiveUp)
    for other in (fail(rank=1), fail(step=6), fail(signal="SIGBUS")):
        assert after([fail(), other], max_failures=5) == Restart()
    assert after([fail(), fail(step=7), fail()], max_failures=5) == Restart()
    nan, other = (fail("error", signal=None, evidence=text) for text in ("ValueError: a", "ValueError: b"))
    assert after([nan, other], max_failures=5) == Restart()
    assert isinstance(after([nan, nan], max_failures=5), GiveUp)


def test_kills_from_outside_may_hit_one_place_by_chance():
    kill = fail(signal="SIGKILL")
    assert after([kill] * 3, max_failures=9) == Restart()
    assert isinstance(after([kill] * 4, max_failures=9), GiveUp)


def test_a_run_that_completes_nothing_is_given_up():
    hosts = [Failure("lost host", rank % 2, rank % 2, None, "gone") for rank in range(4)]
    assert after(hosts[:3], max_failures=3) == Restart()
    verdict = after(hosts, max_failures=3)
    assert isinstance(verdict, GiveUp) and "4 times" in verdict.reason and verdict.reason.count("gone") == 4


def test_what_the_user_must_mend_ends_the_run_at_once():
    assert isinstance(after([fail("error", mendable=True)], max_failures=5), GiveUp)
