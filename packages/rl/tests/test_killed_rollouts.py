"""Runs on rollouts that are killed with -9: no trajectory is counted twice, and no prompt skipped."""

import json
import multiprocessing
import signal
import socket

import pytest

from stack_core.runtime.processes import ProcessesConfig

from .rollouts_child import run

# Each process begins as a copy of one that has imported these modules, which takes most of the time of a short run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["jax.numpy", "stack_rl.rollout_batches", "stack_rl.objectives.presets"])
EARLY = (
    "stack_rl.rollout_journal:RolloutJournal.add:after:2",
    "Training.save:after:1",
    "stack_rl.rollout_journal:RolloutJournal.note:after:3",
)
MOMENTS = (
    *EARLY,
    "Engine.stream:before:9",
    "Sleepy.step:before:17",
    "stack_rl.rollout_journal:RolloutJournal.add:before:3",
    "stack_rl.rollout_journal:RolloutJournal.note:before:4",
    "stack_rl.groups:Ledger.use:after:4",
    "Training.learn:before:5",
    "Training.learn:after:7",
    "Training.save:before:2",
    "stack_core.runtime.journal:Journal.acknowledge:before:4",
    "stack_core.runtime.journal:Journal.acknowledge:after:3",
    "stack_core.runtime.journal:Journal.forget:after:1",
)


def finished(directory, staleness, *moments, refill_rounds=0, replay_groups=0, minibatches=1, victims=None):
    """What the steps of a run used that was killed at each moment in turn, and then went on to its end.

    With `victims`, the run has two processes, of which the victim of each moment is killed, and then the other one.
    """
    count = 1 if victims is None else 2

    def start(moments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        children = []
        for place, moment in enumerate(moments):
            formation = ProcessesConfig(**{"count": 2, "id": place, "coordinator": coordinator} if count == 2 else {})
            arguments = (directory, staleness, moment, refill_rounds, replay_groups, minibatches, formation)
            children.append(PROCESSES.Process(target=run, args=arguments))
            children[-1].start()
        return children

    for moment, victim in zip(moments, victims or [0] * len(moments), strict=True):
        children = start([moment if place == victim else "never" for place in range(count)])
        children[victim].join(timeout=300)
        for child in children:
            child.kill()
            child.join()
        assert children[victim].exitcode == -signal.SIGKILL, f"it was not killed at {moment}"
        assert not (directory / "steps.json").exists()
    for child in start(["never"] * count):
        child.join(timeout=300)
        assert child.exitcode == 0
    return json.loads((directory / "steps.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("whole"), 0)


def check_synchronous(whole, steps):
    assert steps == whole
    assert [each["groups"] for each in steps] == [[2 * step, 2 * step + 1] for step in range(8)]
    assert len({tuple(each["weights"]) for each in steps}) == 8


def check_ahead(steps):
    used = [number for each in steps for number in each["groups"]]
    assert len(used) == 16 == len(set(used))
    assert set(range(16 - 2 * 3)) <= set(used)  # what is not among them may yet be used when it is due
    assert max(each["stale"] for each in steps) <= 2


def test_a_run_that_is_killed_thrice_ends_bitwise_like_a_whole_one(whole, tmp_path):
    check_synchronous(whole, finished(tmp_path, 0, *EARLY))


def test_two_processes_of_which_one_is_killed_end_bitwise_like_one(whole, tmp_path):
    check_synchronous(whole, finished(tmp_path, 0, "stack_rl.rollout_journal:RolloutJournal.note:after:5", victims=[1]))


@pytest.mark.slow  # four processes each
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", EARLY[::2])
def test_two_processes_that_are_killed_in_turn_end_bitwise_like_one(whole, tmp_path, moment, victim):
    check_synchronous(whole, finished(tmp_path, 0, moment, moment, victims=[victim, 1 - victim]))


@pytest.mark.slow  # four processes
def test_two_processes_that_draw_ahead_use_every_group_once(tmp_path):
    steps = finished(tmp_path, 2, "stack_rl.rollout_journal:RolloutJournal.note:after:5", victims=[1])
    check_ahead(steps)
    assert all({number % 2 for number in each["groups"]} == {0, 1} for each in steps)


def test_a_run_that_draws_ahead_uses_every_group_once_whenever_it_is_killed(tmp_path):
    check_ahead(finished(tmp_path, 2, EARLY[1]))


def test_a_run_that_is_killed_between_the_updates_of_a_batch_ends_bitwise_like_a_whole_one(tmp_path):
    """Two epochs of two minibatches; checkpoints of steps 3 and 6 lie within the first and the second batch."""
    whole, cut = (tmp_path / "whole", tmp_path / "cut")
    whole.mkdir(), cut.mkdir()
    moments = (
        "Training.save:after:1",
        "Training.learn:before:2",
        "Training.save:after:1",
    )
    steps, expected = finished(cut, 0, *moments, minibatches=2), finished(whole, 0, minibatches=2)
    for name in ("weights", "reward", "stale"):
        assert [each[name] for each in steps] == [each[name] for each in expected], name
    assert [len(each["groups"]) for each in expected] == [2, 0, 0, 0, 2, 0, 0, 0]
    # A run that resumes within a batch uses its groups, which the checkpoint lists as unused, before its next step.
    assert [each["groups"] for each in steps] == [[0, 1], [], [], [0, 1], [2, 3], [], [2, 3], []]


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_that_were_drawn_in_place_of_flat_ones_outlive_a_kill(tmp_path, staleness):
    moments = ("stack_rl.rollout_journal:RolloutJournal.add:after:3", "Training.save:after:1")
    whole, cut = (tmp_path / "whole", tmp_path / "cut")
    whole.mkdir(), cut.mkdir()
    steps = finished(cut, staleness, *moments, refill_rounds=3)
    used = [number for each in steps for number in each["groups"]]
    assert len(used) > 16 and len(used) == len(set(used))
    if not staleness:
        assert steps == finished(whole, 0, refill_rounds=3)
        assert used == list(range(len(used)))


@pytest.mark.parametrize(
    ("minibatches", "replayed"), [(1, [0, 0, 0, 0.5, 0.5, 0.5, 1, 0]), (2, [0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5])]
)
def test_stored_groups_that_replace_flat_ones_outlive_a_kill(tmp_path, minibatches, replayed):
    """Kills before the checkpoint of a written buffer, and after checkpoint 6, whose buffer the next steps need.

    With two minibatches, this checkpoint lies within the batch that uses the buffer.
    """
    moments = ("stack_rl.replay:ReplayFiles.save:after:1", "Training.save:after:2")[minibatches - 1 :]
    whole, cut = (tmp_path / "whole", tmp_path / "cut")
    whole.mkdir(), cut.mkdir()
    steps = finished(cut, 0, *moments, replay_groups=3, minibatches=minibatches)
    expected = finished(whole, 0, replay_groups=3, minibatches=minibatches)
    for name in ("weights", "reward", "stale", "replayed"):
        assert [each[name] for each in steps] == [each[name] for each in expected], name
    assert [each["replayed"] for each in steps] == replayed
    assert {each.stem for each in (cut / "replay" / "0").iterdir()} <= {"00000006", "00000008"}


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_moment_to_be_killed_at(whole, tmp_path, staleness, moment):
    steps = finished(tmp_path, staleness, moment)
    if staleness:
        check_ahead(steps)
    else:
        check_synchronous(whole, steps)
