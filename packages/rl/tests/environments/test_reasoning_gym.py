"""Tasks of the real reasoning-gym, with its scorers as rewards."""

import sys
import warnings

import pytest

from stack_core.abi.errors import ConfigError
from stack_rl.environments.reasoning_gym import ReasoningGymConfig

from .playing import play_episode, policy

SUMS = {"task": "chain_sum", "settings": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}


@pytest.fixture
def factory():
    reason = "needs reasoning-gym (stack-rl[reasoning-gym]); run with nox -s environments"
    with warnings.catch_warnings(action="ignore"):  # a requirement has SyntaxWarnings, which appear when it is compiled
        return pytest.importorskip("reasoning_gym.factory", reason=reason, exc_type=ImportError)


def entry(factory, place: int, *, seed: int = 7, size: int = 12) -> dict:
    return factory.create_dataset("chain_sum", min_terms=2, max_terms=2, max_digits=2, seed=seed, size=size)[place]


def config(**fields) -> ReasoningGymConfig:
    return ReasoningGymConfig(**{"tasks": (SUMS,), "size": 10, "held_out": 2, "max_tokens": 80, **fields})


def test_the_reward_is_the_scorer_s(factory):
    question = entry(factory, 3)
    tasks, found = play_episode(config(), [f"so <answer> {question['answer']} </answer>"], task=3, seed=7)
    text = tasks.text(tuple(found.tokens.tolist()))
    assert text.startswith("<system>Given a problem") and f"<user>{question['question']}\x00" in text
    assert found.rewards.sum() == 1.0 and found.verdict == "correct"
    dataset = factory.create_dataset("chain_sum", seed=7, size=1)
    near = question["answer"] + "5"
    _, found = play_episode(config(), [f"<answer>{near}</answer>"], task=3, seed=7)
    expected = dataset.score_answer(near, question)
    assert 0 < expected < 1 and found.rewards.sum() == pytest.approx(expected) and found.verdict == "wrong"


def test_an_answer_without_the_tag_or_without_an_end_is_unparsed(factory):
    question = entry(factory, 0)
    _, found = play_episode(config(), [question["answer"]], seed=7)
    assert found.verdict == "unparsed" and found.rewards.sum() == 0.0
    _, found = play_episode(config(answer_tag=None, system_prompt=None), [question["answer"]], seed=7)
    assert found.verdict == "correct" and found.rewards.sum() == 1.0
    cut = config(answer_tag=None, max_tokens=len(question["answer"]))
    _, found = play_episode(cut, [question["answer"]], seed=7)
    assert found.verdict == "unparsed" and found.is_cut


def test_an_answer_that_its_scorer_cannot_parse_does_not_stop_the_run(factory):
    fields = {"tasks": ("prime_factorization",), "size": 2, "held_out": 0, "answer_tag": None}
    with pytest.raises(ValueError, match="invalid literal"):
        dataset = factory.create_dataset("prime_factorization", seed=0, size=1)
        dataset.score_answer("many", dataset[0])
    _, found = play_episode(ReasoningGymConfig(**fields), ["many"])
    assert found.verdict == "unparsed" and found.rewards.sum() == 0.0


def test_several_generators_alternate_and_held_out_questions_follow_the_training_s(factory):
    tasks = config(tasks=(SUMS, "spell_backward")).build(policy(), seq_tokens=100, seed=7)
    assert tasks.training == 20 and tasks.held_out == 4
    assert [tasks.name(each) for each in (0, 1, 2)] == ["chain_sum 0", "spell_backward 0", "chain_sum 1"]
    assert tasks.name(2, held_out=True) == "chain_sum 11"
    question = entry(factory, 11)
    _, found = play_episode(config(), [f"<answer>{question['answer']}</answer>"], task=1, held_out=True, seed=7)
    assert found.verdict == "correct"


def test_the_seed_is_the_run_s_unless_it_is_set(factory):
    answer = f"<answer>{entry(factory, 0, seed=1)['answer']}</answer>"
    assert play_episode(config(seed=1), [answer], seed=7)[1].verdict == "correct"
    assert play_episode(config(), [answer], seed=1)[1].verdict == "correct"
    assert play_episode(config(), [answer], seed=7)[1].verdict == "wrong"


def test_what_reasoning_gym_does_not_have_is_named(factory):
    for tasks, message in [
        (("chain_sums",), r"no task 'chain_sums'\. Did you mean 'chain_sum'"),
        (({"task": "chain_sum", "settings": {"terms": 3}},), "refuses the settings .* TypeError.*'terms'"),
        (({"task": "chain_sum", "settings": {"max_terms": 1}},), "refuses the settings .* AssertionError"),
        (({"task": "chain_sum", "settings": {"seed": 1}},), r"data\.environment\.seed instead"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config(tasks=tasks).check(None)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"(?s)needs the package of 'reasoning_gym'.*Install it: .*reasoning-gym"):
        config().check(None)
