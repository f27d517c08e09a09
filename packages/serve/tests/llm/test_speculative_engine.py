"""Answers of an engine that verifies drafts as often as possible, compared with the same engine without drafts."""

import collections
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from stack_core.abi.generation import Constraint, GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.speculation import Speculation

from .constrained import byte_checkpoint

# Pages for one of the longest continuations, so that four of them preempt one another.
CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=64, max_waiting=10_000, seed=1)
LETTERS = {ord(letter): 60.0 for letter in "abc"}  # a random model repeats itself if it has few tokens
SPECULATION = SpeculationConfig(tokens=5, min_match=1, max_match=3)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLMEngine]:
    with LLMEngine(byte_checkpoint(), CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_cost", lambda *_: 1e-9)
        patch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
        engine = LLMEngine(byte_checkpoint(), dataclasses.replace(CONFIG, speculation=SPECULATION))
        engine.warm_up()
        with engine:
            yield engine
            assert engine.stats().compilations == 0


def request_of(name: str, prompt: tuple[int, ...] | str = "abcab", **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 40, "logit_bias": LETTERS, "temperature": 0.0, **sampling})
    return GenerationRequest(request_id=name, prompt=tuple(map(ord, prompt)), sampling=params)


def run(engine: LLMEngine, *requests: GenerationRequest) -> list[list[GenerationUpdate]]:
    for request in requests:
        engine.submit(request)
    return [list(engine.stream(request.request_id)) for request in requests]


def outcome(updates: list[GenerationUpdate]) -> dict[int, Any]:
    """Tokens, text, figures and end of each continuation; drafts only change which update a token belongs to."""
    found = {}
    for index in {update.index for update in updates}:
        mine = [update for update in updates if update.index == index]
        logprobs = [each for update in mine for each in update.logprobs or ()]
        found[index] = (
            [token for update in mine for token in update.tokens],
            "".join(update.text for update in mine),
            mine[-1].finish_reason,
            mine[-1].stop_reason,
            [(each.token, each.rank, [token for token, _ in each.top]) for each in logprobs],
            [pytest.approx(each.logprob, abs=1e-4) for each in logprobs],
        )
    return found


def assert_equal(plain: LLMEngine, engine: LLMEngine, *requests: GenerationRequest) -> int:
    """Compares the outcomes of both engines, and returns the number of accepted tokens."""
    before = engine.stats()
    for one, other in zip(run(engine, *requests), run(plain, *requests), strict=True):
        assert outcome(one) == outcome(other)
    after = engine.stats()
    assert after.drafted_tokens - before.drafted_tokens >= after.accepted_tokens - before.accepted_tokens
    wait_until_idle(engine)
    return after.accepted_tokens - before.accepted_tokens


def wait_until_idle(engine: LLMEngine) -> None:
    deadline_s = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.waiting or stats.used_pages:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.002)


def random_request(name: str, choose: random.Random) -> GenerationRequest:
    """A request with a random mixture of settings; its prompt shares pages with others."""
    sampling: dict[str, Any] = {
        "max_tokens": choose.randrange(6, 120),
        "temperature": choose.choice([0.0, 0.0, 0.7, 1.5]),
        "seed": choose.randrange(100),
        "n": choose.choice([1, 1, 1, 3]),
        "logprobs": choose.choice([None, None, 2]),
        "logprobs_of": choose.choice(["model", "processed"]),
    }
    extras: list[dict[str, Any]] = [
        {"stop": ("cba", "bbbb"), "include_stop": choose.random() < 0.5},
        {"stop_tokens": (ord("c"),), "min_tokens": 6},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"top_k": 2, "top_p": 0.9},
        {"prompt_logprobs": 1},
    ]
    for extra in choose.sample(extras, choose.randrange(3)):
        sampling |= extra
    return request_of(name, "abcabcab" * choose.randrange(1, 4) + choose.choice("abc"), **sampling)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_answers_are_the_same_with_drafts(plain: LLMEngine, engine: LLMEngine, seed: int) -> None:
    choose = random.Random(seed)
    preempted = engine.stats().preemptions
    requests = [random_request(f"{seed} {number}", choose) for number in range(10)]
    assert assert_equal(plain, engine, *requests) > 20
    assert engine.stats().preemptions > preempted or seed


def test_constrained_answers_are_the_same_with_drafts(plain: LLMEngine, engine: LLMEngine) -> None:
    items = {"type": "array", "items": {"enum": ["aa", "ab"]}, "minItems": 2, "maxItems": 9}
    constraints = [
        Constraint(json_schema=items),
        Constraint(json_schema=items),
        Constraint(regex="(abc|abd){1,12}"),
        Constraint(regex="(ab){3}c"),
        Constraint(choice=("abababababab", "abababa")),
    ]
    requests = [
        request_of(f"{number} {temperature}", constraint=each, temperature=temperature, seed=number, logit_bias={})
        for number, each in enumerate(constraints)
        for temperature in (0.0, 1.0)
    ]
    ignoring = [
        request_of(f"ends {number}", constraint=each, ignore_eos=True, logit_bias={})
        for number, each in enumerate(constraints)
    ]
    assert assert_equal(plain, engine, *requests, request_of("free", max_tokens=90), *ignoring) > 20


@pytest.mark.slow  # compiles programs that report candidates
def test_candidates_are_the_same_with_drafts(plain: LLMEngine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_cost", lambda *_: 1e-9)
        patch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
        with LLMEngine(byte_checkpoint(), dataclasses.replace(CONFIG, speculation=SPECULATION)) as drafting:
            request = request_of("narrow", temperature=1.0, seed=5, top_k=2, candidates=True)
            found = []
            for each in (plain, drafting):
                (updates,) = run(each, request)
                found.append(
                    [pair for update in updates for pair in zip(update.tokens, update.candidates or (), strict=True)]
                )
            assert drafting.stats().accepted_tokens > 0
    assert found[0] == found[1] and len(found[0]) == 40
    assert {len(candidates) for _, candidates in found[0]} == {2}


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(engine: LLMEngine) -> None:
    wanted: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    (alone,) = run(engine, request_of("alone", **wanted))
    crowd = [request_of(f"other {number}", "abc" * number, temperature=1.0) for number in range(1, 5)]
    found = run(engine, *crowd, request_of("crowded", **wanted))
    assert outcome(found[-1]) == outcome(alone)


@pytest.mark.parametrize("name", ["engine", pytest.param("drafting", marks=pytest.mark.slow)])
def test_aborted_requests_return_their_pages(plain: LLMEngine, request: pytest.FixtureRequest, name: str) -> None:
    engine = request.getfixturevalue(name)
    for number in range(8):
        left = request_of(f"left {number}", max_tokens=200, n=4, constraint=Constraint(regex="(abc|abd)+"))
        engine.submit(left)
        updates = engine.stream(left.request_id)
        for _ in range(1 + 3 * number):
            next(updates)
        updates.close()
    wait_until_idle(engine)
    assert assert_equal(plain, engine, request_of("afterwards", max_tokens=100)) > 0


@pytest.mark.parametrize("name", ["engine", "drafting"])
def test_new_weights_may_come_between_steps_with_drafts(request: pytest.FixtureRequest, name: str) -> None:
    engine = request.getfixturevalue(name)
    engine.submit(request_of("new weights", max_tokens=200))
    updates = engine.stream("new weights")
    tokens = [token for _ in range(3) for token in next(updates).tokens]
    engine.update_weights(byte_checkpoint().read(), kv="recompute")
    tokens += [token for update in updates for token in update.tokens]
    (same,) = run(engine, request_of("same weights", max_tokens=200))
    assert tokens == outcome(same)[0][0]
    wait_until_idle(engine)


def test_sampled_tokens_have_the_same_distribution(plain: LLMEngine, engine: LLMEngine) -> None:
    """A chi-square test of homogeneity with fixed seeds: the last three of twelve tokens, sampled by either engine."""
    counts, accepted = list[collections.Counter[tuple[int, ...]]](), engine.stats().accepted_tokens
    for number, each in enumerate((plain, engine)):
        requests = [
            request_of(str(seed), "abcabcab", n=64, temperature=6.0, max_tokens=12, seed=10 * number + seed)
            for seed in range(4)
        ]
        found = [tuple(tokens[-3:]) for updates in run(each, *requests) for tokens, *_ in outcome(updates).values()]
        assert len(found) == 256
        counts.append(collections.Counter(found))
    assert engine.stats().accepted_tokens - accepted > 100
    kinds = [kind for kind, count in (counts[0] + counts[1]).items() if count >= 10]
    statistic = sum((counts[0][kind] - counts[1][kind]) ** 2 / (counts[0][kind] + counts[1][kind]) for kind in kinds)
    # The mean is the number of kinds, and the standard deviation sqrt(2 kinds).
    assert len(kinds) > 8 and statistic < len(kinds) + 3 * (2 * len(kinds)) ** 0.5


def perturbed_params() -> Any:
    """The parameters of `byte_checkpoint` with noise, so that some drafts of this model are accepted."""
    noise = itertools.count()
    return jax.tree.map(
        lambda array: array + 0.1 * jax.random.normal(jax.random.key(next(noise)), array.shape),
        byte_checkpoint().read(),
    )


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLMEngine]:
    """An engine with a draft model, which always drafts; its programs compile on first use."""
    draft = byte_checkpoint(name="draft", read=perturbed_params, max_positions=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_cost", lambda *_: 1e-9)
        patch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
        patch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)
        patch.setattr("stack_serve.llm.engine.open_for_generation", {"DRAFT": draft}.__getitem__)
        speculation = SpeculationConfig(method="draft", tokens=3)
        with LLMEngine(
            byte_checkpoint(), dataclasses.replace(CONFIG, speculation=speculation, draft_model="DRAFT")
        ) as engine:
            yield engine


def test_answers_are_the_same_with_a_draft_model(plain: LLMEngine, drafting: LLMEngine) -> None:
    kinds = [{kind for kind, *_ in programs._keys()} for programs in (plain._programs, *drafting._all_programs)]
    assert kinds[1] - kinds[0] == {"verify"} and kinds[2] == {"decode", "prefill"}
    # More continuations than pages, so that some are preempted; the first reaches the end of the draft model.
    settings: list[dict[str, Any]] = [
        {"max_tokens": 230},
        {"n": 3, "temperature": 0.7, "logprobs": 2, "logprobs_of": "processed", "max_tokens": 100},
        {"temperature": 1.5, "stop": ("cba", "bbbb"), "logprobs": 2, "max_tokens": 100},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "stop_tokens": (ord("c"),), "min_tokens": 6},
    ]
    requests = [request_of(str(number), seed=number, **each) for number, each in enumerate(settings)]
    assert assert_equal(plain, drafting, *requests) > 100
    assert drafting.stats().preemptions > 0


@pytest.mark.slow  # programs of constrained rows
def test_constrained_answers_are_the_same_with_a_draft_model(plain: LLMEngine, drafting: LLMEngine) -> None:
    items = {"type": "array", "items": {"enum": ["aa", "ab"]}, "minItems": 2, "maxItems": 9}
    requests = [
        request_of(f"{number} {temperature}", constraint=each, temperature=temperature, seed=number, logit_bias={})
        for number, each in enumerate((Constraint(json_schema=items), Constraint(regex="(abc|abd){1,12}")))
        for temperature in (0.0, 1.0)
    ]
    assert_equal(plain, drafting, *requests, request_of("free", max_tokens=90))


def test_keys_of_a_draft_model_serve_later_prompts_until_the_engine_sleeps(
    plain: LLMEngine, drafting: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, programs = list[int](), drafting._all_programs[1]
    fill = programs.fill

    def counting_fill(rows: Any, tables: Any) -> None:
        computed.append(sum(tokens for _, _, tokens, *_ in rows))
        fill(rows, tables)

    monkeypatch.setattr(programs, "fill", counting_fill)
    missing = []
    for name in ("first", "again", "awake"):
        if name == "awake":
            drafting.sleep()
            drafting.wake_up()
        computed.clear()
        assert assert_equal(plain, drafting, request_of(name, "cbbaacbbaacbbaacbbaacbbaac", max_tokens=20)) > 5
        missing.append(sum(computed))
    assert missing[0] == missing[2] and 25 <= missing[0] < 30 and missing[1] < 7


@pytest.mark.slow  # another engine
@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
def test_a_draft_model_equal_to_the_served_model_is_always_accepted(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: Any
) -> None:
    """Missing keys, or keys of other pages, would lower the acceptance without changing an answer."""
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
    monkeypatch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)
    monkeypatch.setattr("stack_serve.llm.engine.open_for_generation", lambda address: byte_checkpoint())
    speculation = SpeculationConfig(method="draft", tokens=3)
    config = dataclasses.replace(CONFIG, speculation=speculation, draft_model="DRAFT", cache_dtype=cache_dtype)
    with LLMEngine(byte_checkpoint(), config) as engine:
        for number in range(8):
            settings: dict[str, Any] = {"temperature": 0.5 * (number % 3), "seed": number, "top_p": 0.9}
            engine.submit(request_of(str(number), "abccba" * number + "a", max_tokens=60, n=1 + number % 2, **settings))
        for number in range(8):
            list(engine.stream(str(number)))
        stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 300


def test_an_engine_without_speculation_has_no_programs_for_it(plain: LLMEngine, engine: LLMEngine) -> None:
    kinds = [{kind for kind, *_ in each._programs._keys()} for each in (plain, engine)]
    assert kinds[1] - kinds[0] == {"verify"}


def test_statistics_have_an_acceptance_once_there_are_drafts(plain: LLMEngine, engine: LLMEngine) -> None:
    assert plain.stats().acceptance is None
    run(engine, request_of("drafted"))
    acceptance = engine.stats().acceptance
    assert acceptance is not None and 0 < acceptance <= 1
