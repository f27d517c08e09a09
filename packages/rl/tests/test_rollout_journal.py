"""What a journal of rollouts hands out again, and when it forgets."""

import json
import threading
from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from stack_rl import rollout_batches
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.groups import Group, Ledger
from stack_rl.objectives.presets import DrGRPOConfig
from stack_rl.rollout_journal import RolloutJournal
from stack_rl.rollouts import RolloutData

from .rollouts_child import Engine, SleepyConfig
from .scripted import Policy
from .test_groups import trajectory


class Run:
    """A run of batches of two groups each, whose weights of version v have the digest "w<v>"."""

    def __init__(self, path, opened, *, new=False):
        self.path, self.opened, self.ledger = path, opened, Ledger()
        self.journal = opened.enter_context(closing(RolloutJournal.open(path, new=new)))

    def draw(self, number, version, course="w"):
        self.journal.add([Group(number, version, f"{course}{version}", [trajectory(number, version=version)])])

    def replayed(self, number, digest, version):
        if self.journal.has(number, digest):
            return self.journal.replay(number)
        self.journal.give_up(number, digest, version)
        return None

    def batch(self, version, course="w"):
        """The groups of a batch and whether the journal had them."""
        number = self.ledger.batches
        found = self.replayed(number, f"{course}{version}", version)
        groups = [] if found is None else [each.number for each in found.groups]
        if found is None:
            recorded = self.journal.usable(version, f"{course}{version}")
            numbers = self.ledger.unused()
            groups = [next(numbers) for _ in range(2)]
            for each in set(groups) - recorded:
                self.draw(each, version, course)
            self.journal.note(number, groups, f"{course}{version}", version)
        self.ledger.use(groups)
        return groups, found is not None

    def save(self, step):
        self.journal.position(step, self.ledger.batches)
        return step, self.ledger.state()

    def again(self, saved=None):
        """The run after a kill, from a checkpoint or from its start."""
        other = Run(self.path, self.opened)
        step, state = saved or (0, Ledger().state())
        other.ledger.restore(state)
        other.journal.begin(other.ledger, step)
        return other


@pytest.fixture
def run(tmp_path):
    with ExitStack() as opened:
        begun = Run(tmp_path / "rollouts.journal", opened, new=True)
        begun.journal.begin(begun.ledger, 0)
        yield begun


def test_a_killed_run_gets_the_same_batches_and_then_what_was_drawn_for_none(run):
    for version in range(2):
        run.batch(version)
    saved = run.save(2)
    later = [run.batch(version)[0] for version in (2, 3)]
    run.draw(9, 4)
    other = run.again(saved)
    assert [other.batch(version) for version in (2, 3)] == [(groups, True) for groups in later]
    assert other.journal.usable(4, "w4") == {9}
    assert other.batch(4) == ([8, 9], False)
    assert other.ledger.frontier == 10


def test_a_run_without_a_checkpoint_begins_with_what_it_had(run):
    first = run.batch(0)[0]
    assert run.again().batch(0) == (first, True)


def test_another_course_of_weights_draws_again_what_later_ones_had_drawn(run):
    for version in range(4):
        run.batch(version)
    run.draw(8, 1)
    other = run.again()
    assert other.batch(0) == ([0, 1], True)
    with pytest.warns(UserWarning, match=r"before batch 1 .* 3 batches are made again, and 7 groups"):
        assert other.batch(1, course="other") == ([2, 3], False)
    third = other.again()
    assert set(third.journal.recorded) == {0, 1, 2, 3}  # the first batch's, and what was drawn again


def test_what_a_group_of_the_same_version_but_other_weights_drew_is_left_out(run):
    run.draw(0, 0, course="other")
    run.draw(1, 0)
    run.draw(2, 1)
    assert run.journal.usable(0, "w0") == {1}


def test_a_group_may_arrive_while_others_are_selected(run):
    class ArrivingGroup(Group):
        """Group during whose inspection another thread adds a group."""

        @property
        def newest(self):
            threads.append(threading.Thread(target=run.draw, args=(1, 0)))
            threads[-1].start()
            threads[-1].join(0.2)
            return 0

    threads: list[threading.Thread] = []
    run.journal.add([ArrivingGroup(0, 0, "w0", [trajectory(0, version=0)])])
    assert run.journal.usable(0, "w0") == {0}
    for thread in threads:
        thread.join()
    assert set(run.journal.recorded) == {0, 1}


def test_what_checkpoints_have_learned_from_is_forgotten_once_none_needs_it(run):
    saved = []
    for version in range(3):
        run.batch(version)
        saved.append(run.save(version + 1))
    entries = lambda: [each.key for each in run.journal.journal.read("group")]
    waiting = lambda: [each.key for each in run.journal.journal.read("group", waiting=True)]
    run.journal.saved(1, [1])
    assert entries() == ["2", "3", "4", "5"]
    run.journal.saved(2, [1, 2])
    assert entries() == ["2", "3", "4", "5"] and waiting() == ["4", "5"]
    # The checkpoint of step 2 is damaged: from that of step 1 on, what step 2 had learned from is there.
    other = run.again(saved[0])
    assert [other.batch(version) for version in (1, 2)] == [([2, 3], True), ([4, 5], True)]
    again = other.again(saved[2])
    assert not again.journal.recorded and again.batch(3) == ([6, 7], False)


def test_scores_outlive_a_kill_and_a_begun_batch_needs_no_digest(run):
    run.batch(0)
    saved = run.save(1)
    scores = {"values": np.arange(6, dtype=np.float32).reshape(2, 3), "policy_logprobs": np.zeros((1, 2), np.float32)}
    run.draw(2, 1), run.draw(3, 1)
    run.journal.note(1, [2, 3], "w1", 1, scores)
    other = run.again(saved)
    found = other.replayed(1, None, 3)  # weights that two updates of the batch changed
    assert found is not None and (found.version, [each.number for each in found.groups]) == (1, [2, 3])
    assert {name: array.tolist() for name, array in found.scores.items()} == {
        name: array.tolist() for name, array in scores.items()
    }


def test_a_batch_that_another_process_has_no_record_of_is_given_up_and_its_groups_are_used_again(run):
    run.batch(0)
    saved = run.save(1)
    run.batch(1)
    other = run.again(saved)
    assert other.journal.has(1, "w1")
    other.journal.give_up(1, "w1", 1)  # without a warning, since the weights are the same
    assert not other.journal.has(1, "w1") and other.journal.usable(1, "w1") == {2, 3}
    assert other.batch(1) == ([2, 3], False)


def test_a_new_run_does_not_take_up_what_another_left(run):
    run.batch(0)
    run.journal.close()
    fresh = Run(run.path, run.opened, new=True)
    fresh.journal.begin(fresh.ledger, 0)
    assert not fresh.journal.recorded


def test_groups_of_another_environment_are_drawn_again(run):
    for version in range(3):
        run.batch(version, course="old:")
    saved = run.save(1)
    run.draw(9, 3, course="old:")
    run.ledger.restore(saved[1])
    with pytest.warns(UserWarning, match=r"1 groups in the run's journal were drawn with another data.environment"):
        run.journal.begin(run.ledger, 1, "new:")
    assert not run.journal.recorded
    assert run.batch(3, course="new:") == ([6, 7], False)
    again = run.again()  # from the start, whose batches are of the old environment
    with pytest.warns(UserWarning, match="drawn with another data.environment"):
        again.journal.begin(again.ledger, 0, "new:")
    assert set(again.journal.recorded) == {6, 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": SleepyConfig(first_token=50)},
        {"groups": 3},
        {"group_size": 3},
        {"seq_tokens": 7},
        {"top_p": 0.9},
        {"top_k": 2},
        {},
    ],
    ids=lambda changes: next(iter(changes), "none"),
)
@pytest.mark.parametrize("version", [0, 5])
def test_a_resumed_run_is_handed_no_groups_of_other_settings(tmp_path, monkeypatch, changes, version):
    """`--allow data.environment` with a checkpoint of version 5, whose position is left out, and without one."""
    monkeypatch.setattr(rollout_batches, "registries", SimpleNamespace(engines={"static": Engine}))

    def batch(version=0, **changes):
        settings = {"environment": SleepyConfig(), "groups": 2, "group_size": 2, "seq_tokens": 8} | changes
        with closing(RolloutData(**settings).for_objective(DrGRPOConfig()).build(seed=0, model=None)) as data:
            data.write(tmp_path)
            (tmp_path / "config.yaml").touch()
            data.take_policy(Policy)
            data.update_weights({"w": jnp.ones(2)}, version, lambda params, batch: {})
            return next(data.train_iterator())

    first = batch()
    message = "data starts over: 2 groups" if version else "2 groups .* another data.environment"
    with pytest.warns(UserWarning, match=message) if changes or version else nullcontext():
        again = batch(version, **changes)
    assert (again["staleness"] == 0).all()
    if changes.keys() <= {"environment"}:
        assert (again["tokens"] == first["tokens"]).all() == (not changes)


def test_task_files_that_changed_are_another_environment(tmp_path):
    """An answer that was mended after a kill must not be scored as it was before."""
    tasks = tmp_path / "tasks.jsonl"

    def digest(answer):
        tasks.write_text(json.dumps({"prompt": "1 + 1", "answer": answer}) + "\n")
        return RolloutData(environment=PromptsConfig(source=str(tasks), rewards=("exact",))).draw_digest

    assert digest("3") == digest("3") != digest("2")


@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_run_drops_the_samples_of_one_that_failed_to_start(tmp_path, is_new):
    samples = tmp_path / "samples.jsonl"
    samples.write_text("{}\n")
    if not is_new:
        (tmp_path / "config.yaml").touch()
    settings = RolloutData(environment=SleepyConfig(), seq_tokens=8)
    with closing(settings.for_objective(DrGRPOConfig()).build(seed=0, model=None)) as data:
        data.write(tmp_path)
    assert samples.exists() != is_new
