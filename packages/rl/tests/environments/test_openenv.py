"""Episodes against a server of the real OpenEnv."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.environments.openenv import OpenEnvConfig
from stack_rl.episodes import Attempt, Player

from ..scripted import END, ScriptedEngine
from .playing import play_episode, policy

SESSIONS = 3


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("openenv.core", reason="needs openenv (stack-rl[openenv]); run with nox -s environments")
    command = [sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(SESSIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


def hidden(task: int, *, held_out: bool = False, below: int = 10) -> int:
    return int(np.random.default_rng([0, held_out, task]).integers(1 << 31)) % below


def test_an_episode_is_a_session_with_its_seed_and_rewards(url):
    answer = hidden(4)
    guesses = [str(answer + 1), str(answer - 1), str(answer)]
    config = OpenEnvConfig(url=url, action="number", observation="hint", instruction="Guess.")
    tasks, found = play_episode(config, guesses, task=4)
    text = tasks.text(tuple(found.tokens.tolist()))
    assert text == (
        f"<user>Guess.\nbelow 10\x00\n<assistant>{guesses[0]}\x00\n<user>less\x00\n<assistant>{guesses[1]}\x00\n"
        f"<user>more\x00\n<assistant>{guesses[2]}\x00"
    )
    assert found.rewards[found.rewards != 0].tolist() == [-0.25, -0.25, 1.0] and found.facts["turns"] == 3.0
    _, found = play_episode(config, [str(hidden(4, held_out=True))], task=4, held_out=True)
    assert found.rewards.sum() == 1.0


def test_actions_and_observations_are_json_unless_a_field_is_named(url):
    config = OpenEnvConfig(url=url, reset={"below": 5}, max_turns=2)
    tasks, found = play_episode(config, ['{"number": 99}', f'{{"number": {hidden(0, below=5)}}}'])
    text = tasks.text(tuple(found.tokens.tolist()))
    assert '<user>{"hint": "below 5", "guesses": 0}\x00' in text and '{"hint": "less", "guesses": 1}' in text
    assert found.rewards.sum() == 0.75


@pytest.mark.parametrize("answer", ["seven", '{"number": "seven"}', '{"guess": 7}', "7"])
def test_an_answer_that_is_no_action_ends_the_episode(url, answer):
    _, found = play_episode(OpenEnvConfig(url=url, invalid_reward=-2.0), [answer])
    assert found.verdict == "unparsed" and found.rewards.sum() == -2.0


def test_episodes_at_the_same_time_do_not_share_a_game(url):
    tasks = OpenEnvConfig(url=url, action="number").build(policy(), seq_tokens=200, seed=0)
    answers = iter([hidden(0), 99, 99, hidden(0), hidden(0)])
    engine = ScriptedEngine(lambda prompt: (*map(ord, str(next(answers))), END))
    player = Player(tasks, engine, seq_tokens=200, on_failure="stop")
    found = player.play([Attempt(0, 0)] * SESSIONS, seed=(0,), greedy=False)
    assert [each.rewards.sum() for each in found if each is not None] == [1.0, 0.75, 0.75]
    texts = [tasks.text(tuple(each.tokens.tolist())) for each in found[1:] if each is not None]
    assert all('"guesses": 1' in each for each in texts), "a shared game would count the guesses of others"
    with pytest.raises(EnvironmentFailed, match="Raise max_concurrent_envs of the server"):
        player.play([Attempt(0, 0)] * (SESSIONS + 1), seed=(0,), greedy=False)


def test_an_error_of_the_server_is_a_failure(url):
    with pytest.raises(EnvironmentFailed, match="the game broke"):
        play_episode(OpenEnvConfig(url=url, action="number"), ["77"])


def test_a_server_or_a_field_that_does_not_exist_is_named(url):
    with pytest.raises(ConfigError, match=r"observation is 'text', but .* have the fields hint, guesses"):
        OpenEnvConfig(url=url, observation="text").check(None)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9' does not answer: .*Start it"):
        OpenEnvConfig(url="http://127.0.0.1:9", timeout_s=1.0).check(None)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ConfigError, match=r"(?s)'openenv' needs.*rl.*\[openenv\]"):
        OpenEnvConfig(url="http://127.0.0.1:9").check(None)
