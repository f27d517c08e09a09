"""Logits processors in an engine; `stack_core`'s tests compare them with their formulas."""

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import jax.numpy as jnp
import pytest
from pydantic import Field

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, GenerationError, PluginError, UnknownName
from stack_core.abi.generation import Constraint
from stack_core.abi.plugins import registries
from stack_core.ops.sampling.processors import NO_TOKEN, LogitsProcessor
from stack_serve.llm import logits_processors
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.speculation import Speculation

from .constrained import byte_checkpoint
from .test_speculative_engine import SPECULATION, assert_equal, outcome, request_of, run

CONFIG = EngineConfig(
    max_sequences=4, step_tokens=16, page_tokens=4, seed=1, logits_processors=("fresh", "broken", "raised")
)


@config
class Fresh:
    """Excludes the last tokens, if there are any."""

    last: Annotated[int, Field(ge=0)] = 1


def fresh(logits: Any, params: Any, history: Any) -> Any:
    recent = jnp.arange(len(history.tokens)) >= history.length - params.last
    return logits.at[jnp.where(recent, history.tokens, NO_TOKEN)].set(-jnp.inf)


@config
class Nothing: ...


@config
class Raised:
    token: int
    amount: float = 100.0


REGISTERED = {
    "fresh": LogitsProcessor(Fresh, fresh),
    "broken": LogitsProcessor(Nothing, lambda logits, params, history: logits * jnp.nan),
    "raised": LogitsProcessor(Raised, lambda logits, params, history: logits.at[params.token].add(params.amount)),
    "untraceable": LogitsProcessor(Nothing, lambda logits, params, history: logits + params.bias),
    "string": "not a processor",
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Registers the processors of this module, as a plugin would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_processors, "registries", SimpleNamespace(logits_processors=REGISTERED))
        yield


@pytest.fixture(scope="module")
def plain(registered: None) -> Iterator[LLMEngine]:
    with LLMEngine(byte_checkpoint(), CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(registered: None) -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_cost", lambda *_: 1e-9)
        patch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
        with LLMEngine(byte_checkpoint(), dataclasses.replace(CONFIG, speculation=SPECULATION)) as engine:
            yield engine


def text_of(updates: Any, index: int = 0) -> str:
    return outcome(updates)[index][1]


def test_a_request_selects_and_parameterizes_a_processor_and_others_do_not_change(plain: LLMEngine) -> None:
    free = request_of("free")
    requests = [request_of(f"{last}", logits_processors={"fresh": {"last": last}}) for last in (1, 2)]
    (alone,), _ = run(plain, free), run(plain, *requests)
    before = plain.stats().compilations
    together = run(plain, free, *requests[1:], *requests[:1])
    assert text_of(together[0]) == text_of(alone)
    assert plain.stats().compilations == before
    texts = [text_of(each) for each in together]
    assert len(set(texts)) == 3
    for last, answer in zip((2, 1), texts[1:], strict=True):
        text = "abcab" + answer
        assert all(text[place] not in text[place - last : place] for place in range(5, len(text))), text
    # A random model repeats some letter if it may.
    assert re.search(r"(.)\1", texts[0])


def test_processors_compose_with_seeds_continuations_constraints_and_logprobs(plain: LLMEngine) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 3,
        "n": 3,
        "logprobs": 3,
        "logprobs_of": "processed",
        "constraint": Constraint(regex="[abc]{30}"),
        "logits_processors": {"fresh": 1, "raised": {"token": ord("z")}},
    }
    (first,) = run(plain, request_of("first", **options))
    crowd = [request_of(f"other {number}", "abc" * number, temperature=1.0) for number in range(1, 4)]
    again = run(plain, *crowd, request_of("again", **options))[-1]
    assert outcome(first) == outcome(again)
    for index in range(3):
        text = text_of(first, index)
        # The constraint excludes z, however likely the processor makes it.
        assert re.fullmatch("[abc]{30}", text) and not re.search(r"(.)\1", "b" + text)
        # Two of the three letters remain, and the third has no probability.
        for _, _, top in outcome(first)[index][4][:30]:  # then the end token follows
            assert set(top[:2]) < set(b"abc")
    logprobs = [each for update in first if update.index == 0 for each in update.logprobs or ()]
    assert all(each.top[2][1] == -float("inf") for each in logprobs)


def test_answers_are_the_same_with_drafts(plain: LLMEngine, drafting: LLMEngine) -> None:
    requests = [
        request_of(
            f"{last} {temperature} {bool(constraint)}",
            "abcabcab",
            logits_processors={"fresh": last},
            temperature=temperature,
            seed=last,
            constraint=constraint,
            logprobs=2,
            logprobs_of="processed",
        )
        for last in (1, 2)
        for temperature in (0.0, 0.7)
        for constraint in (None, Constraint(regex="[abc]{20,60}"))
    ]
    assert assert_equal(plain, drafting, *requests, request_of("free")) > 20


@pytest.mark.slow  # another engine, with a draft model
def test_a_draft_model_samples_with_the_processors(plain: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model equal to the served model drafts the same tokens, so nearly all are accepted."""
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
    monkeypatch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)
    monkeypatch.setattr("stack_serve.llm.engine.open_for_generation", lambda address: byte_checkpoint())
    speculation = SpeculationConfig(method="draft", tokens=3)
    config = dataclasses.replace(CONFIG, speculation=speculation, draft_model="DRAFT")
    with LLMEngine(byte_checkpoint(), config) as engine:
        requests = [
            request_of(f"{seed}", logits_processors={"fresh": 1}, temperature=1.0, seed=seed) for seed in range(4)
        ]
        assert assert_equal(plain, engine, *requests) > 50
        acceptance = engine.stats().acceptance
    assert acceptance is not None and acceptance > 0.95


def test_logits_that_a_processor_makes_nan_end_one_request_with_its_name(plain: LLMEngine) -> None:
    broken, other = run(plain, request_of("broken", logits_processors={"broken": {}}), request_of("other"))
    assert broken[-1].finish_reason == "error" and other[-1].finish_reason == "length"
    assert "NaN or infinite" in str(broken[-1].error) and str(broken[-1].error).endswith("request: broken.")


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        ({"frsh": 1}, "no logits processor 'frsh'. Did you mean 'fresh'?"),
        ({"fresh": {"first": 1}}, "Unknown key 'fresh.first'"),
        ({"fresh": -1}, "fresh.last: Input should be greater than or equal to 0"),
        ({"raised": {}}, "raised.token is missing"),
    ],
)
def test_wrong_names_and_parameters_are_refused(plain: LLMEngine, requested: dict[str, Any], says: str) -> None:
    request = request_of("wrong", logits_processors=requested)
    for act in (plain.check, plain.submit):
        with pytest.raises(GenerationError, match=re.escape(says)) as caught:
            act(request)
        assert caught.value.parameter == "logits_processors"


def test_an_engine_without_processors_refuses_them_and_has_no_words_for_them(plain: LLMEngine) -> None:
    engine = LLMEngine(byte_checkpoint(), EngineConfig(max_sequences=1))
    with pytest.raises(GenerationError, match=r"The engine was started with: none \(--logits-processors"):
        engine.check(request_of("wrong", logits_processors={"fresh": 1}))
    words = logits_processors.open_processors(CONFIG.logits_processors).words
    widths = [each._programs.slots.settings.shape[1] for each in (engine, plain)]
    assert widths == [logits_processors.SETTINGS_WORDS, logits_processors.SETTINGS_WORDS + words]


def test_processors_that_do_not_exist_or_work_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="names a processor twice"):
        EngineConfig(logits_processors=("fresh", "fresh"))
    for name, says in (("untraceable", "'untraceable' cannot be traced"), ("string", "a LogitsProcessor was expected")):
        with pytest.raises(PluginError, match=says):
            LLMEngine(byte_checkpoint(), EngineConfig(logits_processors=(name,)))
    monkeypatch.setattr(logits_processors, "registries", registries)
    with pytest.raises(UnknownName, match="Unknown name 'nothing' among logits_processors"):
        LLMEngine(byte_checkpoint(), EngineConfig(logits_processors=("nothing",)))
