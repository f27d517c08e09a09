"""Constrained continuations of a random model, which follows no format unless it must."""

import json
import re
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import Constraint, GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler, Matcher
from stack_serve.llm.engine import LLMEngine

from ..openai.fake_engine import EOS
from .constrained import byte_checkpoint
from .tiny_checkpoint import TinyCheckpoint

# Pages for one of the longest continuations, so that four of them preempt one another. Programs are those of
# `test_speculative_engine`, so JAX's cache has them.
CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=64, max_waiting=10_000)
# All schemas are read as draft 2020-12, in which a `$id` beside `$ref` has an effect; draft 7 ignored it.
SUITE = [
    entry
    for entry in json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text())["schemas"]
    if entry["name"] != "draft7/ref: $ref prevents a sibling $id from changing the base uri"
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b", None]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
# A random model hardly ever ends a text or a value by itself.
ENDING = {ord('"'): 3.0, ord("}"): 3.0, ord("]"): 3.0, EOS: 5.0}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine(byte_checkpoint(), CONFIG)
    engine.warm_up()
    with engine:
        yield engine
        assert engine.stats().compilations == 0


def request_of(name: str, constraint: Constraint | None = None, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, "constraint": constraint, **sampling})
    return GenerationRequest(request_id=name, prompt=(10, 11), sampling=params)


def run(engine: LLMEngine, *requests: GenerationRequest) -> list[list[GenerationUpdate]]:
    for request in requests:
        engine.submit(request)
    return [list(engine.stream(request.request_id)) for request in requests]


def text_of(updates: list[GenerationUpdate], index: int = 0) -> str:
    return "".join(update.text for update in updates if update.index == index)


def tokens_of(updates: list[GenerationUpdate], index: int = 0) -> list[int]:
    return [token for update in updates if update.index == index for token in update.tokens]


def reasons_of(updates: list[GenerationUpdate]) -> set[str | None]:
    return {update.finish_reason for update in updates if update.finish_reason is not None}


def wait_until_idle(engine: LLMEngine) -> None:
    deadline_s = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.waiting or stats.used_pages:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.002)


def assert_valid(schema: Any, text: str, *, draft: str = "draft2020-12") -> None:
    # Decimals, because a multiple of 0.0001 need not be one after rounding to a float.
    schema, value = (json.loads(each, parse_float=Decimal) for each in (json.dumps(schema), text))
    cls = jsonschema.Draft7Validator if draft == "draft7" else jsonschema.Draft202012Validator
    cls(schema, format_checker=cls.FORMAT_CHECKER).validate(value)


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_follow_the_json_schema_test_suite(engine: LLMEngine, every: int) -> None:
    schemas, refused = dict[str, Any](), list[str]()
    for entry in SUITE[::every]:
        constraint = Constraint(json_schema=entry["schema"])
        refusal = _refusal(engine, request_of(entry["name"], constraint, max_tokens=120, n=2, logit_bias=ENDING))
        if refusal is None:
            schemas[entry["name"]] = entry["schema"]
        else:
            assert refusal.parameter == "constraint" and "cannot be compiled: " in str(refusal)
            refused.append(entry["name"])
    whole = 0
    for name, schema in schemas.items():
        updates = list(engine.stream(name))
        assert reasons_of(updates) <= {"stop", "length"}, updates[-1]
        for end in (update for update in updates if update.finish_reason == "stop"):
            assert_valid(schema, text_of(updates, end.index), draft=name.partition("/")[0])
            whole += 1
    # Schemas with `not`, `if`, `contains`, ... are refused.
    assert len(schemas) > 0.4 * (len(schemas) + len(refused)) and refused
    assert whole > 1.8 * len(schemas)
    wait_until_idle(engine)


def _refusal(engine: LLMEngine, request: GenerationRequest) -> GenerationError | None:
    try:
        engine.submit(request)
    except GenerationError as error:
        return error
    return None


def test_a_continuation_does_not_depend_on_the_batch_or_on_preemption(engine: LLMEngine) -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string", "minLength": 90}}}
    requests = [
        request_of(f"{seed}", Constraint(json_schema=schema), max_tokens=220, seed=seed, logit_bias=ENDING, n=2)
        for seed in range(4)
    ]
    alone = [run(engine, request)[0] for request in requests[:2]]
    before = engine.stats().preemptions
    together = run(engine, *requests)
    assert engine.stats().preemptions > before
    for index in range(2):
        assert [tokens_of(each, index) for each in alone] == [tokens_of(each, index) for each in together[:2]]
    texts = [text_of(updates, index) for updates in together for index in range(2)]
    assert len(set(texts)) == 8
    ended = [text for updates in together for text in _texts_that_stopped(updates)]
    assert len(ended) >= 4
    for text in ended:
        assert_valid(schema, text)
    wait_until_idle(engine)


def _texts_that_stopped(updates: list[GenerationUpdate]) -> list[str]:
    return [text_of(updates, update.index) for update in updates if update.finish_reason == "stop"]


def test_rows_without_a_constraint_generate_beside_others_what_they_generate_alone(engine: LLMEngine) -> None:
    plain = [
        request_of("greedy", temperature=0.0, logprobs=2),
        request_of("sampled", seed=9, top_p=0.9, logprobs=2),
        request_of("penalized", seed=3, presence_penalty=1.0, n=2, logprobs=2),
    ]
    alone = [run(engine, request)[0] for request in plain]
    constrained = [
        request_of(f"constrained {seed}", Constraint(json_schema=PERSON), seed=seed, max_tokens=100)
        for seed in range(3)
    ]
    beside = run(engine, *plain, *constrained)[:3]
    for one, other in zip(alone, beside, strict=True):
        for index in range(2):
            assert tokens_of(one, index) == tokens_of(other, index)
            figures = [
                [each.logprob for update in updates if update.index == index for each in update.logprobs or ()]
                for updates in (one, other)
            ]
            assert figures[0] == pytest.approx(figures[1], abs=1e-4)


def test_rows_without_a_constraint_use_the_programs_of_an_engine_without_constraints() -> None:
    with LLMEngine(byte_checkpoint(), CONFIG) as engine:
        run(engine, request_of("plain", max_tokens=20))
        assert "forward" not in {kind for kind, *_ in engine._programs._compiled.programs}
        run(engine, request_of("constrained", Constraint(choice=("abcdef",)), max_tokens=20))
        assert "forward" in {kind for kind, *_ in engine._programs._compiled.programs}


def test_log_probabilities_of_forced_tokens_are_zero_under_the_processed_distribution(engine: LLMEngine) -> None:
    constraint = Constraint(choice=("abc",))
    of_model, processed = (
        [each for update in updates for each in update.logprobs or ()]
        for updates in run(
            engine,
            request_of("model", constraint, logprobs=3),
            request_of("processed", constraint, logprobs=3, logprobs_of="processed", top_p=0.5),
        )
    )
    assert [each.token for each in of_model] == [each.token for each in processed] == [*b"abc", EOS]
    assert [each.logprob for each in processed] == [0.0] * 4
    assert all(each.top[1][1] == float("-inf") for each in processed)
    assert all(-50 < each.logprob < -0.1 for each in of_model)


@pytest.mark.parametrize(
    ("constraint", "sampling", "expected", "reason"),
    [
        (Constraint(choice=("yes",)), {}, "yes", "stop"),
        (Constraint(choice=("yes",)), {"ignore_eos": True}, "yes", "stop"),
        (Constraint(choice=("yes",)), {"min_tokens": 20}, "yes", "stop"),
        (Constraint(choice=("yes",)), {"stop": ("e",)}, "y", "stop"),
        (Constraint(choice=("yes",)), {"stop_tokens": (ord("e"),)}, "y", "stop"),
        (Constraint(choice=("yes",)), {"max_tokens": 2}, "ye", "length"),
        (Constraint(choice=("",)), {"min_tokens": 3}, "", "stop"),
        (Constraint(regex="ab*"), {"min_tokens": 9, "logit_bias": {EOS: 90.0}}, "abbbbbbbb", "stop"),
        (Constraint(regex="[a-c]+"), {"ignore_eos": True, "max_tokens": 30}, r"[a-c]{30}", "length"),
        (Constraint(regex="\N{SNOWMAN}{4}"), {"temperature": 0.0}, "\N{SNOWMAN}" * 4, "stop"),
        (Constraint(regex="[a-z]{30}"), {"repetition_penalty": 1.9, "min_p": 0.1}, "[a-z]{30}", "stop"),
        (Constraint(regex="[0-9]{12}"), {"top_k": 1, "logit_bias": {97: 100.0}}, "[0-9]{12}", "stop"),
    ],
)
def test_other_settings_act_within_the_language(
    engine: LLMEngine, constraint: Constraint, sampling: dict[str, Any], expected: str, reason: str
) -> None:
    (updates,) = run(engine, request_of("both", constraint, **sampling))
    assert re.fullmatch(expected, text_of(updates)) and reasons_of(updates) == {reason}


def test_a_model_without_end_tokens_ends_with_the_language() -> None:
    checkpoint = byte_checkpoint(end_tokens=frozenset())
    with LLMEngine(checkpoint, CONFIG) as engine:
        (updates,) = run(engine, request_of("endless", Constraint(choice=("yes", "no"))))
    assert text_of(updates) in ("yes", "no") and reasons_of(updates) == {"stop"}


def test_an_abort_in_the_middle_returns_the_pages(engine: LLMEngine) -> None:
    wait_until_idle(engine)
    engine.submit(request_of("endless", Constraint(regex="[a-z]*"), n=4, max_tokens=200, ignore_eos=True))
    updates = engine.stream("endless")
    assert next(updates).tokens and engine.stats().used_pages > 0
    updates.close()  # type: ignore[attr-defined]
    wait_until_idle(engine)
    assert text_of(run(engine, request_of("next", Constraint(choice=("yes",))))[0]) == "yes"


def test_a_constraint_that_cannot_be_followed_ends_its_request_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = engine._constraint_compiler().matcher(Constraint(regex="b+"))
    monkeypatch.setattr(Matcher, "error", property(lambda self: "too complex" if self.state is broken[0] else None))
    broken = [failing.state]
    original = ConstraintCompiler.matcher

    def matcher(self: ConstraintCompiler, constraint: Constraint) -> Matcher:
        return failing if constraint.regex == "b+" else original(self, constraint)

    monkeypatch.setattr(ConstraintCompiler, "matcher", matcher)
    requests = [request_of(regex, Constraint(regex=regex)) for regex in ("a{9}", "b+")]
    one, other = run(engine, *requests)
    assert text_of(one) == "a" * 9 and reasons_of(other) == {"error"}
    assert other[-1].error == "The constraint cannot be followed after this text: too complex."
    wait_until_idle(engine)


def test_what_cannot_be_constrained_is_refused_before_it_waits(engine: LLMEngine) -> None:
    for check in (engine.check, engine.submit):
        with pytest.raises(GenerationError, match="unclosed group") as caught:
            check(request_of("bad", Constraint(regex="(")))
        assert caught.value.parameter == "constraint"
    mute = LLMEngine(TinyCheckpoint(), EngineConfig(max_sequences=1, step_tokens=8))
    for refused in (lambda: mute.submit(request_of("mute", Constraint(regex="a"), max_tokens=5)),
                    lambda: mute.compile_constraint(Constraint(regex="a"))):  # fmt: skip
        with pytest.raises(GenerationError, match="tokenizer") as caught:
            refused()
        assert caught.value.parameter == "constraint"
