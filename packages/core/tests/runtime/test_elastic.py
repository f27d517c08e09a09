"""Runs over a range of hosts: real agents that are killed and come back."""

import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest

from stack_core.abi.errors import ClusterError
from stack_core.abi.events import FormationFormed, RunStarted, StepFinished
from stack_core.commands.cluster import _status
from stack_core.runtime.record import ClusterRecord


def agents(record, host):
    return [note["pid"] for note in record.notes("agent") if note["on"] == host]


def trajectory(events):
    """The loss of each step of the run that its last checkpoint led to: steps that were lost are taken back."""
    losses = {}
    for event in events:
        if isinstance(event, RunStarted):
            losses = {step: loss for step, loss in losses.items() if step <= event.first_step}
        elif isinstance(event, StepFinished):
            assert event.step not in losses
            losses[event.step] = event.metrics["loss"]
    return losses


def placements(events):
    return [event.hosts for event in events if isinstance(event, FormationFormed)]


class Leaves:
    """Kills the agent of host 1 after a step of both hosts, and lets the lonely worker go on once it is back."""

    def __init__(self, folder, at_step):
        self.folder, self.at_step = folder, at_step
        self.hosts, self.kills, self.done = (), 0, False
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __call__(self, event, record):
        if isinstance(event, FormationFormed):
            self.hosts = event.hosts
        if isinstance(event, StepFinished) and event.step >= self.at_step and self.hosts == (0, 1) and not self.kills:
            (self.folder / "back").unlink(missing_ok=True)
            self.kills = 1
            os.kill(agents(record, 1)[-1], signal.SIGKILL)

    def watch(self):
        record = ClusterRecord(self.folder / "cluster")
        while not self.done:
            if agents(record, 0) and len(agents(record, 1)) > self.kills:
                (self.folder / "back").touch()
            time.sleep(0.05)


def test_a_run_goes_on_with_one_of_two_hosts_and_takes_the_other_back(bench):
    bench.run("calm", steps=24, step_s=0.0, config=replace(bench.config, hosts=1))
    calm = trajectory(bench.events)
    bench.events.clear()
    folder = bench.root / "struck"
    folder.mkdir()
    leaves = Leaves(folder, at_step=10)
    leaves.thread.start()
    config = replace(bench.config, hosts="1..2", missing_s=0.1)
    _, record = bench.run("struck", on_event=leaves, config=config, steps=24, step_s=0.1, waits=True)
    leaves.done = True
    leaves.thread.join()
    # A host that is slower than `missing_s` at the start joins after the first checkpoint as well.
    assert placements(bench.events)[-3:] == [(0, 1), (0,), (0, 1)]
    struck = trajectory(bench.events)
    assert list(struck) == list(calm) == list(range(1, 25))
    assert list(struck.values()) == pytest.approx(list(calm.values()), rel=1e-5)
    [failure] = record.notes("failure")
    assert (failure["cause"], failure["failed_host"]) == ("lost host", 1)
    assert [size["hosts"] for size in _status(record)["sizes"]][-3:] == [2, 1, 2]
    bench.assert_nothing_is_left(record)


@pytest.mark.slow
def test_numbers_of_hosts_that_do_not_divide_the_rows_are_passed_over(bench):
    config = replace(bench.config, hosts="1..3", missing_s=60.0)
    _, record = bench.run("divided", config=config, step_s=0.0)
    assert placements(bench.events) == [(0, 1, 2), (0, 1)]
    [note] = record.notes("unfit")
    assert (note["hosts"], note["reason"]) == (3, "16 rows are no multiple of 3")
    assert [size["hosts"] for size in _status(record)["sizes"]] == [2] and record.notes("failure") == []
    fits_none = r"in cluster\.hosts 2\.\.3 fits the run\.\n3 hosts: 7 rows .*\n2 hosts: 7 rows"
    with pytest.raises(ClusterError, match=fits_none):
        bench.run("indivisible", config=replace(config, hosts="2..3"), step_s=0.0, rows=7)
    assert bench.processes() == []


class Blows:
    """Kills one worker or agent in each formation that completes some steps, until `left` is used up."""

    def __init__(self, seed, left):
        self.generator, self.left, self.wait_steps = random.Random(seed), left, None

    def __call__(self, event, record):
        if isinstance(event, FormationFormed):
            self.hosts, self.number = event.hosts, event.number
            self.wait_steps = self.generator.randint(1, 9)
        elif isinstance(event, StepFinished) and self.wait_steps is not None and self.left:
            self.wait_steps -= 1
            if self.wait_steps == 0:
                self.strike(record)

    def strike(self, record):
        rank = self.generator.randrange(len(self.hosts))
        if self.generator.random() < 0.6:
            pid = agents(record, self.hosts[rank])[-1]
        else:
            workers = [note for note in record.notes("worker") if note["number"] == self.number]
            pid = next(note["pid"] for note in workers if note["rank"] == rank)
        self.left, self.wait_steps = self.left - 1, None
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_ten_random_kills_over_one_to_three_hosts(bench):
    bench.run("calm", steps=200, step_s=0.0, rows=12)
    calm = trajectory(bench.events)
    bench.events.clear()
    blows = Blows(0, 10)
    config = replace(bench.config, hosts="1..3", missing_s=0.2, max_failures=10)
    _, record = bench.run("struck", on_event=blows, steps=200, step_s=0.1, rows=12, config=config)
    struck = trajectory(bench.events)
    assert blows.left == 0 and len(record.notes("failure")) == 10
    assert list(struck) == list(range(1, 201))
    assert list(struck.values()) == pytest.approx(list(calm.values()), rel=1e-5)
    sizes = {len(hosts) for hosts in placements(bench.events)}
    assert 3 in sizes and len(sizes) > 1 and record.notes("resized")
    bench.wait_until_gone()
