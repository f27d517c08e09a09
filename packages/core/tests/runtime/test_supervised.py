"""Runs over two agents and their workers, killed and stopped on the way: real processes, joined by JAX."""

import os
import signal

import pytest

from stack_core.errors import RunGivenUp
from stack_core.events import FormationFormed, StepFinished, WorkerDied


class Strike:
    """Sends a signal once, when a step is done, to a worker ("rank", 0) or an agent ("agent", 1)."""

    def __init__(self, victim, number=signal.SIGKILL, at_step=6):
        self.victim, self.number, self.at_step = victim, number, at_step
        self.struck = False

    def __call__(self, event, record):
        if self.struck or not isinstance(event, StepFinished) or event.step != self.at_step:
            return
        self.struck = True
        kind, place = self.victim
        name = {"rank": "worker", "agent": "agent"}[kind]
        pid = [note["pid"] for note in record.notes(name) if note.get("rank", note["on"]) == place][-1]
        os.kill(pid, self.number)


def assert_recovered(bench, strike, kind, blamed):
    calm, record = bench.run("calm", step_s=0.0)
    bench.assert_nothing_is_left(record)
    bench.events.clear()
    struck, record = bench.run("struck", on_event=strike)
    assert strike.struck and struck == calm
    [failure] = record.notes("failure")
    assert (failure["cause"], failure["rank"]) == (kind, blamed), failure
    assert [type(event) for event in bench.events if not isinstance(event, StepFinished)].count(WorkerDied) == 1
    assert [event.number for event in bench.events if isinstance(event, FormationFormed)] == [1, 2]
    bench.assert_nothing_is_left(record)
    return record


def test_a_killed_worker_is_named_and_the_run_ends_bitwise_as_if_nothing_had_been(bench):
    record = assert_recovered(bench, Strike(("rank", 0)), "signal", 0)
    [end] = record.notes("end")
    first, last = record.notes("session")[0]["time"], end["time"]
    assert sum(end["seconds"].values()) == pytest.approx(last - first, rel=0.01, abs=0.05)
    assert 0 < end["goodput"] < 1 and end["seconds"]["done again"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number", "kind", "blamed"),
    [
        (("rank", 1), signal.SIGKILL, "signal", 1),
        (("rank", 1), signal.SIGSEGV, "signal", 1),
        (("rank", 0), signal.SIGSTOP, "stopped", 0),
        (("agent", 1), signal.SIGKILL, "lost host", 1),
        (("agent", 0), signal.SIGSTOP, "lost host", 0),
    ],
)
def test_whoever_is_killed_or_stopped(bench, victim, number, kind, blamed):
    assert_recovered(bench, Strike(victim, number), kind, blamed)


@pytest.mark.slow
def test_a_step_that_fails_twice_ends_the_run_with_its_evidence(bench):
    with pytest.raises(
        RunGivenUp, match=r"2 times in a row .*rank 1 on host 1: ValueError: these rows are bad \(at step 6"
    ):
        bench.run("poison", fails_at=6, step_s=0.0)
    assert bench.processes() == []
