"""The warning about rewards with nothing to learn: when it comes, and what it says."""

import json
import warnings

import numpy as np
import pytest

from stack_rl.contracts import Trajectory
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.objectives.presets import DAPOConfig, DistillConfig, GRPOConfig, ReinforceConfig
from stack_rl.progress import RewardMonitor

from .scripted import END, Letters, Policy, ScriptedEngine


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "How much is 2 + 3?", "answer": "5"}))
    config = PromptsConfig(source=str(path), rewards=({"name": "math", "library": "none"},), max_tokens=24)
    return config.build(Policy(), seq_tokens=64, seed=0)


def played(tasks, text, *, ends=True, count=4):
    """Episodes in which the policy answers `text`, played in groups of two."""
    answer = tuple(Letters().encode(text, add_special_tokens=False)) + ((END,) if ends else ())
    player = Player(tasks, ScriptedEngine(lambda prompt: answer), seq_tokens=64, on_failure="stop")
    return player.play([Attempt(place // 2, 0) for place in range(count)], seed=(0,), greedy=False)


def warning(tasks, batches, algorithm=None):
    """The message after several batches, and the number of the batch after which it came."""
    monitor = RewardMonitor(tasks, GRPOConfig() if algorithm is None else algorithm)
    for number, each in enumerate(batches, start=1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.check(each)
        if caught:
            return number, str(caught[0].message)
    return None, ""


def rewarded(rewards, **fields):
    return [
        Trajectory(
            group=place // 2,
            task=0,
            tokens=np.asarray([1, 50, 60 + place, END], np.int32),
            sampled=np.asarray([False, False, True, True]),
            logprobs=np.zeros(4, np.float32),
            versions=np.zeros(4, np.int32),
            rewards=np.asarray([0, 0, 0, reward], np.float32),
            **{"verdict": "wrong", **fields},
        )
        for place, reward in enumerate(rewards)
    ]


def test_a_run_whose_answers_cannot_be_parsed_names_an_answer_and_what_was_read_in_it(tasks):
    answers = played(tasks, "It is about 2 + 3 or so")
    number, message = warning(tasks, [answers] * 4)
    assert number == 3
    assert "learned nothing from the first 3 batches" in message
    assert "Of 4 answers: 100% unparsed, 0% cut by a token limit, 0% correct; rewards 0 to 0." in message
    assert "prompts.jsonl:1" in message and "'How much is 2 + 3?'" in message
    assert "answer: 'It is about 2 + 3 or so'\n" in message
    assert "read by the reward: no answer; verdict unparsed, reward 0" in message
    assert "state the format that the reward reads" in message and "data.environment.rewards" in message
    assert "max_tokens" not in message


def test_what_was_read_and_cut_answers_are_named(tasks):
    _, message = warning(tasks, [played(tasks, "the answer is 5 apples and more", ends=True)] * 3)
    assert "(cut by its token limit)" in message and "raise data.environment.max_tokens" in message
    _, message = warning(tasks, [played(tasks, "answer: 3 +* 4")] * 3)
    assert "read by the reward: '3 +* 4'; verdict unparsed" in message
    _, message = warning(tasks, [played(tasks, "answer: 6")] * 3)
    assert "read by the reward: '6'; verdict wrong" in message and "partial credit" in message
    assert "data.temperature" in message  # both attempts of a group are the same text
    _, message = warning(tasks, [played(tasks, "answer: 5")] * 3)
    assert "100% correct" in message and "use harder ones" in message and "partial credit" not in message


def test_an_action_with_a_limit_of_one_token_is_not_cut(tasks):
    _, message = warning(tasks, [rewarded([0, 0, 0, 0], is_cut=True, action_starts=(2, 3))] * 3)
    assert "0% cut by a token limit" in message and "max_tokens" not in message
    _, message = warning(tasks, [rewarded([0, 0, 0, 0], is_cut=True, action_starts=(2,))] * 3)
    assert "100% cut by a token limit" in message and "max_tokens" in message


def test_it_comes_once_and_only_at_the_start(tasks):
    flat, unequal = rewarded([0, 0, 1, 1]), rewarded([0, 1, 0, 0])
    assert warning(tasks, [flat, flat, unequal, flat, flat, flat, flat]) == (None, "")
    monitor = RewardMonitor(tasks, GRPOConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(9):
            monitor.check([*flat, None])
    assert len(caught) == 1
    assert warning(tasks, [flat, flat, flat])[0] == 3


@pytest.mark.parametrize("algorithm", [PPOConfig(epochs=1, minibatches=1), ReinforceConfig(kl=0.0)])
def test_without_a_group_baseline_the_rewards_of_the_batch_count(tasks, algorithm):
    assert warning(tasks, [rewarded([0, 0, 1, 1])] * 4, algorithm) == (None, "")
    assert warning(tasks, [rewarded([1, 1, 1, 1])] * 4, algorithm)[0] == 3


def test_penalties_of_long_answers_are_rewards_and_distillation_reads_none(tasks):
    answers = rewarded([0, 0, 0, 0], limit_tokens=2)
    # Two batches are 32 updates of DAPO.
    assert warning(tasks, [answers] * 2, DAPOConfig())[0] == 2
    answers[0].sampled[2] = False  # shorter than its sibling
    assert warning(tasks, [answers] * 4, DAPOConfig()) == (None, "")
    assert warning(tasks, [answers] * 4, DistillConfig(reference="run:teacher")) == (None, "")
