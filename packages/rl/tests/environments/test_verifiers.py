"""Environments of the real verifiers, with their rubrics as rewards."""

import signal
import sys
import types
import warnings

import pytest

from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.environments.verifiers import VerifiersConfig

from .playing import play_episode

ROWS = [{"question": f"letter {each}?", "answer": each} for each in "abcdef"]


@pytest.fixture(scope="module")
def vf():
    pytest.importorskip("stack_serve", reason="needs stack-serve (stack-rl[verifiers]); run with nox -s environments")
    reason = "needs verifiers (stack-rl[verifiers]); run with nox -s environments"
    with warnings.catch_warnings(action="ignore"):
        vf = pytest.importorskip("verifiers", reason=reason)
        if not hasattr(vf, "load_environment"):
            pytest.skip(reason + ": this version is too new")
        vf.SingleTurnEnv  # noqa: B018  # loads the library, whose requirements have warnings of their own
    return vf


def single(vf, **fields):
    from datasets import Dataset

    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)

    def length(completion):
        return len(completion[-1]["content"])

    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), system_prompt="One letter.", rubric=rubric, **fields)


def guessing(vf, max_turns=3):
    """The policy guesses a letter and is told whether it was too low; a second word ends the game."""
    from datasets import Dataset

    class Guessing(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            said = messages[-1]["content"]
            if said == "break":
                raise vf.Error("the game broke")
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "right"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "later" if said < state["answer"] else "earlier"}]

    def found(completion, answer):
        return float(any(each["content"] == answer for each in completion if each["role"] == "assistant"))

    dataset = Dataset.from_list(ROWS)
    return Guessing(dataset=dataset, eval_dataset=dataset, rubric=vf.Rubric(funcs=[found]), max_turns=max_turns)


def test_the_rubric_scores_a_single_turn(vf):
    config = VerifiersConfig(env=single(vf), held_out=2)
    tasks, found = play_episode(config, ["b"], task=1)
    text = tasks.text(tuple(found.tokens.tolist()))
    assert text == "<system>One letter.\x00\n<user>letter b?\x00\n<assistant>b\x00"
    assert found.rewards.sum() == 1.25 and found.verdict == "correct"
    assert found.facts["exact"] == 1.0 and found.facts["length"] == 1.0 and found.facts["num_turns"] == 1.0
    _, found = play_episode(config, ["x"], task=1)
    assert found.rewards.sum() == 0.25 and found.verdict == "wrong" and found.facts["exact"] == 0.0
    assert tasks.training == 4 and tasks.held_out == 2
    assert play_episode(config, ["f"], task=1, held_out=True)[1].verdict == "correct"


def test_an_environment_of_several_turns_replies_until_it_ends(vf):
    config = VerifiersConfig(env=guessing(vf), held_out=5)
    tasks, found = play_episode(config, ["a", "e", "c"], task=2)
    text = tasks.text(tuple(found.tokens.tolist()))
    assert text == (
        "<user>letter c?\x00\n<assistant>a\x00\n<user>later\x00\n<assistant>e\x00\n<user>earlier\x00\n<assistant>c\x00"
    )
    assert found.rewards.sum() == 1.0 and found.facts["num_turns"] == 3.0 and not found.is_truncated
    assert found.rewards.nonzero()[0].tolist() == [len(found.tokens) - 1]
    assert tasks.training == 6 and tasks.held_out == 5
    _, found = play_episode(config, ["c"], task=2)
    assert found.rewards.sum() == 1.0 and found.facts["num_turns"] == 1.0
    _, found = play_episode(config, ["a", "a", "a"], task=2)
    assert found.rewards.sum() == 0.0 and found.verdict == "wrong"


def test_the_rubric_scores_a_conversation_that_ran_out_of_room_and_an_empty_answer(vf):
    config = VerifiersConfig(env=guessing(vf), held_out=0)
    _, found = play_episode(config, ["a"], task=2, seq_tokens=50)
    assert found.is_truncated and found.facts["found"] == 0.0 and found.facts["num_turns"] == 1.0
    _, found = play_episode(VerifiersConfig(env=single(vf), held_out=0), [""])
    assert found.rewards.sum() == 0.0 and found.verdict == "wrong"


def test_an_error_of_the_environment_is_a_failure(vf):
    with pytest.raises(EnvironmentFailed, match=r"(?s)example 2 failed: .*the game broke"):
        play_episode(VerifiersConfig(env=guessing(vf), held_out=0), ["break"], task=2)


def test_an_installed_environment_is_loaded_by_its_id_and_signals_keep_their_handlers(vf, monkeypatch):
    module = types.ModuleType("letters_env")
    module.load_environment = lambda threshold: single(vf, pass_threshold=threshold)
    monkeypatch.setitem(sys.modules, "letters_env", module)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for env in ("letters-env", "letters_env:load_environment"):
        config = VerifiersConfig(env=env, args={"threshold": 0.2}, held_out=0)
        tasks, found = play_episode(config, ["x"])
        assert found.verdict == "correct" and tasks.name(0) == f"{env} example 0"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_what_cannot_be_played_is_refused(vf, monkeypatch):
    grouped = single(vf)
    grouped.rubric.add_reward_func(lambda completions: [0.0] * len(completions))
    for env, message in [
        ("no-such-env", "cannot load 'no-such-env'"),
        (lambda: 3, "is a int; a SingleTurnEnv"),
        (grouped, "scores whole groups"),
        (single(vf), r"6 examples, of which data\.environment\.held_out: 64"),
    ]:
        with pytest.raises(ConfigError, match=message):
            VerifiersConfig(env=env).check(None)
    monkeypatch.setattr(vf, "__version__", "0.4.0")
    with pytest.raises(ConfigError, match=r"version 0\.3 was the last to have it"):
        VerifiersConfig(env="any").check(None)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"(?s)'verifiers' needs.*rl.*\[verifiers\]"):
        VerifiersConfig(env="any").check(None)
