"""Runs over two agents and their workers, killed and stopped on the way: real processes, joined by JAX."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import ClusterError, Interrupted, RunAbandoned
from stack_core.abi.events import FormationFormed, StepFinished, WorkerDied
from stack_core.runtime.record import ClusterRecord
from stack_core.runtime.signals import StopRequest


def pid_of(record, victim):
    """The newest process that a record names as ("rank", 0) or ("agent", 1)."""
    kind, place = victim
    name = {"rank": "worker", "agent": "agent"}[kind]
    return [note["pid"] for note in record.notes(name) if note.get("rank", note["on"]) == place][-1]


class Strike:
    """Sends a signal once, when a step is done, to a worker ("rank", 0) or an agent ("agent", 1)."""

    def __init__(self, victim, number=signal.SIGKILL, at_step=6):
        self.victim, self.number, self.at_step = victim, number, at_step
        self.struck = False

    def __call__(self, event, record):
        if self.struck or not isinstance(event, StepFinished) or event.step != self.at_step:
            return
        self.struck = True
        os.kill(pid_of(record, self.victim), self.number)


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


class Blows:
    """Strikes at random moments, one blow a formation: while it joins, between two steps, or in a save."""

    def __init__(self, seed, count):
        self.generator = random.Random(seed)
        self.left, self.struck, self.timer = count, [], None

    def __call__(self, event, record):
        if isinstance(event, FormationFormed):
            forming = self.generator.random() < 0.2
            self.wait_steps = None if forming else self.generator.randint(1, 6)
            if forming and self.left:
                self.arm(record, self.generator.uniform(0.2, 1.0))
        elif isinstance(event, StepFinished) and self.wait_steps is not None:
            self.wait_steps -= 1
            if self.wait_steps == 0 and self.left:
                self.arm(record, self.generator.uniform(0.0, 0.06))

    def arm(self, record, after_s):
        self.left -= 1
        victim = (self.generator.choice(("rank", "rank", "rank", "agent")), self.generator.randrange(2))
        number = self.generator.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        self.timer = threading.Timer(after_s, self.strike, (record, victim, number))
        self.timer.start()

    def strike(self, record, victim, number):
        os.kill(pid_of(record, victim), number)
        self.struck.append((victim, number))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 5), (1, 30)])
def test_random_blows_end_bitwise_equal_and_each_is_blamed_on_the_right_one(bench, seed, count):
    calm, _ = bench.run("calm", steps=8 * count, step_s=0.0)
    blows = Blows(seed, count)
    config = replace(bench.config, max_failures=30)
    struck, record = bench.run("struck", on_event=blows, steps=8 * count, step_s=0.05, config=config)
    assert struck == calm
    expected = [
        ("lost host" if kind == "agent" else "signal" if number is signal.SIGKILL else "stopped", place)
        for (kind, place), number in blows.struck
    ]
    assert len(expected) == count
    assert [(note["cause"], note["failed_host"]) for note in record.notes("failure")] == expected
    bench.assert_nothing_is_left(record)


DRIVER = """
import json, sys
from pathlib import Path
from stack_core.abi.config import parse
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.supervised import Job, supervise
settings, arguments = json.loads(sys.argv[1]), json.loads(sys.argv[2])
job = Job("gradient_job:descend", arguments, ("gradient_job",))
config, folder = parse(ClusterConfig, settings), Path(arguments["folder"])
supervise(job, config, folder, observe=lambda event: None, stop=StopRequest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_second_driver_attaches_to_what_a_killed_or_stopped_one_left(bench, number):
    calm, _ = bench.run("calm", steps=60, step_s=0.0)
    folder = bench.root / "left"
    folder.mkdir()
    arguments = {"folder": str(folder), "steps": 60, "step_s": 0.2}
    command = [sys.executable, "-c", DRIVER, json.dumps(to_mapping(bench.config)), json.dumps(arguments)]
    with subprocess.Popen(command) as first:
        record = ClusterRecord(folder / "cluster")
        while not any(note["event"] == "CheckpointSaved" for note in record.notes("event")):
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(number)
        with pytest.raises(ClusterError, match=r"steps: 61, not 60"):
            bench.run("left", steps=61, step_s=0.2)
        left, record = bench.run("left", steps=60, step_s=0.2)
    assert left == calm
    assert record.notes("failure") == [] and len(record.notes("attached")) == 1
    [end] = record.notes("end")
    wall_s = end["time"] - record.notes("session")[0]["time"]
    assert sum(end["seconds"].values()) == pytest.approx(wall_s, rel=0.01, abs=0.05)
    bench.assert_nothing_is_left(record)


@pytest.mark.slow
def test_a_step_that_fails_twice_ends_the_run_with_its_evidence(bench):
    with pytest.raises(
        RunAbandoned, match=r"2 times in a row .*rank 1 on host 1: ValueError: these rows are bad \(at step 6"
    ):
        bench.run("poison", fails_at=6, step_s=0.0)
    assert bench.processes() == []


@pytest.mark.slow
def test_a_stop_request_reaches_the_workers_and_what_they_raise_is_raised_here(bench):
    stop = StopRequest()

    def ask(event, record):
        if isinstance(event, StepFinished) and event.step == 5:
            stop.received = signal.SIGINT

    with pytest.raises(Interrupted, match="stopped after step"):
        bench.run("stopped", on_event=ask, stop=stop, steps=200, stops=True)
    assert bench.processes() == []
    _, record = bench.run("stopped", steps=12, step_s=0.0)
    assert record.notes("failure") == []
    bench.assert_nothing_is_left(record)
