"""The environment `sorting`: rewards of answers of all lengths, and refusals."""

import asyncio

import pytest

from stack_core.abi.errors import ConfigError
from stack_rl.contracts import Action
from stack_rl.environments.sorting import SortingConfig

from ..scripted import Policy

BAR, END = 10, 11


def tasks(**settings):
    return SortingConfig(**settings).build(Policy(), seq_tokens=16, seed=0)


@pytest.mark.parametrize(
    ("change", "reward", "verdict"),
    [
        (lambda right: right, 1.0, "correct"),
        (lambda right: right[:-1], 0.75, "wrong"),  # cut before its end token
        (lambda right: [right[0], END], 0.25, "wrong"),
        (lambda right: [*right[:-1], right[0], END], 0.75, "wrong"),  # one digit more
        (lambda right: [right[1], *right[1:]], 0.0, "wrong"),
    ],
    ids=["right", "cut", "short", "long", "unsorted"],
)
def test_the_reward_is_the_matching_part_of_the_right_answer(change, reward, verdict):
    found = tasks(max_digits=3)
    number = next(number for number in range(100) if len(asyncio.run(found.episode(number).reset()).tokens) == 4)
    episode = found.episode(number)
    prompt = asyncio.run(episode.reset())
    assert prompt.tokens[-1] == BAR and prompt.stop_tokens == (END,) and prompt.max_tokens == 8
    action = Action(tokens=tuple(change([*sorted(prompt.tokens[:-1]), END])), finish_reason="stop")
    result = asyncio.run(episode.step(action))
    assert (result.reward, result.verdict, result.observation) == (reward, verdict, None)


def test_tasks_have_all_lengths_and_held_out_tasks_are_others():
    found = tasks(max_digits=4, symbols=5, held_out=50)
    rows = [asyncio.run(found.episode(number).reset()).tokens[:-1] for number in range(50)]
    held_out = [asyncio.run(found.episode(number, held_out=True).reset()).tokens[:-1] for number in range(50)]
    assert {len(row) for row in rows} == {1, 2, 3, 4} and all(len(set(row)) == len(row) for row in rows)
    assert max(max(row) for row in rows) == 4
    assert found.held_out == 50 and rows != held_out
    assert found.text((3, BAR, END, 14)) == "3 | . <14>" and found.name(3, held_out=True) == "sorting held out 3"


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"symbols is 3, but a row has up to 4 different digits"):
        SortingConfig(symbols=3)
    with pytest.raises(ConfigError, match=r"max_tokens is 4, but sorting 4 digits takes 5 tokens"):
        SortingConfig(max_digits=4, max_tokens=4)
    with pytest.raises(ConfigError, match=r"seq_tokens is 10; an episode of 'sorting' has up to 13 tokens"):
        SortingConfig().build(Policy(), seq_tokens=10, seed=0)
    with pytest.raises(ConfigError, match=r"vocab_size is 8, but the environment 'sorting' has 12"):
        SortingConfig().check(type("Model", (), {"vocab_size": 8}))
