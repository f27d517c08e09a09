"""Environments of the real Gymnasium, played in text."""

import sys

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_rl.environments.gymnasium import GymnasiumConfig, _as_text

from .playing import play_episode


@pytest.fixture
def gymnasium():
    reason = "needs gymnasium (stack-rl[gymnasium]); run with nox -s environments"
    return pytest.importorskip("gymnasium", reason=reason)


def lake(answers, **fields):
    config = GymnasiumConfig(id="FrozenLake-v1", options={"is_slippery": False}, **fields)
    tasks, found = play_episode(config, answers)
    return tasks.text(tuple(found.tokens.tolist())), found


def test_an_environment_of_gymnasium_is_played_in_text(gymnasium):
    text, found = lake(["1", "go 1", "2", "1", "2", "2"], instruction="0 left, 1 down, 2 right, 3 up.")
    assert text.startswith(
        "<user>0 left, 1 down, 2 right, 3 up.\n0\x00\n<assistant>1\x00\n<user>4\x00\n<assistant>go 1"
    )
    assert found.rewards.sum() == 1.0 and found.facts["turns"] == 6.0


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CliffWalking-v1", "CartPole-v1"])
def test_observations_and_rewards_are_those_of_the_environment(gymnasium, name):
    actions = np.random.default_rng(0).integers(2, size=8).tolist()
    tasks, found = play_episode(GymnasiumConfig(id=name, max_turns=8), [f"action {each}" for each in actions], task=5)
    seed = int(np.random.default_rng([0, False, 5]).integers(1 << 31))
    env = gymnasium.make(name)
    observation, _ = env.reset(seed=seed)
    expected, rewards = [f"<user>{_as_text(observation)}\x00\n<assistant>"], []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        expected.append(f"action {action}\x00")
        if terminated or truncated or len(rewards) == 8:
            break
        expected.append(f"\n<user>{_as_text(observation)}\x00\n<assistant>")
    env.close()
    assert tasks.text(tuple(found.tokens.tolist())) == "".join(expected)
    np.testing.assert_allclose(found.rewards[found.rewards != 0], [each for each in rewards if each])


def test_text_is_shown_and_accepted_as_it_is(gymnasium):
    spaces = gymnasium.spaces

    class Echo(gymnasium.Env):
        observation_space = spaces.Dict({"said": spaces.Text(64), "count": spaces.Discrete(9)})
        action_space = spaces.Text(5)

        def reset(self, *, seed=None, options=None):
            return {"said": "go  on\nnow", "count": np.int64(0)}, {}

        def step(self, action):
            return {"said": action, "count": np.int64(1)}, float(action == "north"), False, False, {}

    gymnasium.register("StackEcho-v0", entry_point=Echo, disable_env_checker=True)
    try:
        config = GymnasiumConfig(id="StackEcho-v0", max_turns=3, invalid_reward=-2.0)
        tasks, found = play_episode(config, ["north", "south", "a longer text"])
    finally:
        gymnasium.registry.pop("StackEcho-v0")
    text = tasks.text(tuple(found.tokens.tolist()))
    assert "<user>said: go  on\nnow, count: 0\x00" in text and "<user>said: south, count: 1\x00" in text
    assert found.rewards.sum() == -1.0 and found.verdict == "unparsed"


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ((np.int64(4), np.float32(0.5), "a b"), "(4, 0.5, a b)"),
        (np.full(2000, 7), f"[{' '.join(['7'] * 2000)}]"),
        (np.array([[1, 2], [3, 4]]), "[[1 2] [3 4]]"),
    ],
)
def test_numbers_have_no_type_and_arrays_no_gap(observation, expected):
    assert _as_text(observation) == expected


def test_text_that_is_no_action_ends_the_episode(gymnasium):
    _, found = lake(["1", "9"], invalid_reward=-1.0)
    assert found.verdict == "unparsed" and found.rewards.sum() == -1.0
    _, found = lake(["1", "west"])
    assert found.verdict == "unparsed" and found.rewards.sum() == 0.0


def test_an_environment_that_gymnasium_does_not_have_is_named(gymnasium):
    with pytest.raises(ConfigError, match="cannot make 'NoSuch-v0'"):
        GymnasiumConfig(id="NoSuch-v0").check(None)
    with pytest.raises(ConfigError, match="only Discrete and Text"):
        GymnasiumConfig(id="Pendulum-v1").check(None)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"(?s)'gymnasium' needs.*rl.*\[gymnasium\]"):
        GymnasiumConfig(id="FrozenLake-v1").check(None)
