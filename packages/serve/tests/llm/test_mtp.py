"""Drafts of a multi-token prediction layer while pages change hands, compared with the layer without a cache.

A missing key, or a key of another page, lowers the acceptance without changing an answer. The first draft of each step
depends on all keys of its sequence, so it shows such a fault.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.speculation import Speculation

from .tiny_checkpoint import POSITIONS, TinyCheckpoint, share_programs
from .tiny_mtp import MtpCheckpoint, mtp_layer, mtp_params

# Pages for one of the longest sequences and a half, so that three of them preempt one another.
CONFIG = EngineConfig(max_sequences=3, step_tokens=16, page_tokens=4, pages=18, decode_repeats=1)
MTP = dataclasses.replace(CONFIG, speculation=SpeculationConfig(method="mtp", tokens=3))
PROMPT = tuple(range(1, 18))

FirstDraft = tuple[str, int, int]


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
    monkeypatch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[FirstDraft]:
    """The first draft of each step: name of the request, place of the newest token, and drafted token."""
    drafts, propose = list[FirstDraft](), Proposer.propose

    def record(proposer: Proposer, tables: Any, rows: Any) -> Any:
        proposed = propose(proposer, tables, rows)
        for (row, _), tokens in zip(rows, proposed, strict=True):
            if tokens:
                drafts.append((row.sequence.request_id, row.start, tokens[0]))
        return proposed

    monkeypatch.setattr(Proposer, "propose", record)
    return drafts


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(MtpCheckpoint(), MTP) as engine:
        yield engine


def request_of(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 20) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id=name, prompt=prompt, sampling=sampling)


def run(engine: LLMEngine, *requests: GenerationRequest) -> dict[str, list[int]]:
    """Returns the prompt and the output of each request, after the engine has released their pages."""
    for request in requests:
        engine.submit(request)
    answers = {request.request_id: list(engine.stream(request.request_id)) for request in requests}
    wait_until_idle(engine)
    return {request.request_id: texts(request, answers[request.request_id]) for request in requests}


def texts(request: GenerationRequest, updates: list[GenerationUpdate]) -> list[int]:
    return [*request.prompt, *(token for update in updates for token in update.tokens)]


def wait_until_idle(engine: LLMEngine) -> None:
    deadline_s = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.waiting or stats.used_pages:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.002)


@jax.jit
def _predict(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    model, positions = MtpCheckpoint().model(params), jnp.arange(POSITIONS)[None]
    hidden = model(tokens, positions).hidden
    ahead = model.predict_ahead(hidden[:, :-1], tokens[:, 1:], positions[:, :-1])
    return model.logits(hidden)[0].argmax(axis=-1), model.logits(ahead.hidden)[0].argmax(axis=-1)


def predictions(tokens: list[int], params: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the most likely token after each token, and the layer's for the one after that, without a cache."""
    padded = np.zeros((1, POSITIONS), np.int32)
    padded[0, : len(tokens)] = tokens
    return jax.device_get(_predict(mtp_params() if params is None else params, padded))


def correct(found: list[FirstDraft], answers: dict[str, list[int]], params: Any = None) -> list[bool]:
    """Returns for each draft whether the layer predicts it without a cache."""
    predicted = {name: predictions(tokens, params)[1] for name, tokens in answers.items()}
    return [token == predicted[name][start - 1] for name, start, token in found]


def at_turn(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], *, turn: int = 3) -> None:
    """Runs an action in the engine's thread before its first draft."""
    turns = list[None]()

    def pays(*_: Any) -> bool:
        turns.append(None)
        if len(turns) == turn:
            action()
        return len(turns) > turn

    monkeypatch.setattr(Speculation, "pays", pays)


def test_preempted_sequences_are_drafted_with_their_new_pages(engine: LLMEngine, found: list[FirstDraft]) -> None:
    requests = [request_of(str(number), PROMPT[number : number + 9], 36) for number in range(3)]
    answers = run(engine, *requests)
    for request in requests:
        tokens, first = answers[request.request_id], len(request.prompt)
        assert tokens[first:] == predictions(tokens)[0][first - 1 : len(tokens) - 1].tolist()
        assert len(tokens) == first + 36
    assert engine.stats().preemptions > 0
    assert len(found) > 20 and all(correct(found, answers))


def test_a_prefix_of_another_prompt_is_drafted_with_its_keys(engine: LLMEngine, found: list[FirstDraft]) -> None:
    run(engine, request_of("first"))
    found.clear()
    hits = engine.stats().prefix_hits_tokens
    answers = run(engine, request_of("second", (*PROMPT[:14], 30, 29, 28)))
    assert engine.stats().prefix_hits_tokens - hits == 12
    assert len(found) > 3 and all(correct(found, answers))


def test_pages_are_handed_over_with_hidden_states_and_without_keys_of_the_layer(
    engine: LLMEngine, found: list[FirstDraft]
) -> None:
    engine.prepare_handover()
    run(engine, request_of("computed"))
    exported = engine.export_pages(request_of(""))
    found.clear()
    other = LLMEngine(MtpCheckpoint(), MTP)
    share_programs(engine, other)
    with other:
        own = run(other, request_of("other", PROMPT[::-1]))
        keys = np.array(other._programs._layers.mtp.layer.key)
        other.import_pages(request_of(""), exported)
        # The pages may be recorded as computed for this prompt, so their keys must stay.
        np.testing.assert_array_equal(other._programs._layers.mtp.layer.key, keys)
        own |= run(other, request_of("received"))
        assert other.stats().prefix_hits_tokens == 16
    assert len(found) > 6 and all(correct(found, own))


@pytest.mark.parametrize("level", [1, 2])
def test_it_drafts_again_after_a_sleep(engine: LLMEngine, found: list[FirstDraft], level: Any) -> None:
    before = run(engine, request_of("one"))
    engine.sleep(level)
    engine.wake_up()
    found.clear()
    assert run(engine, request_of("one")) == before
    assert len(found) > 3 and all(correct(found, before))


def test_new_weights_of_the_layer_are_used_alone(engine: LLMEngine, found: list[FirstDraft]) -> None:
    before = run(engine, request_of("one"))
    engine.update_weights({"mtp": mtp_layer(1)})
    try:
        found.clear()
        assert run(engine, request_of("one")) == before
        assert len(found) > 3 and all(correct(found, before, {**mtp_params(), "mtp": mtp_layer(1)}))
    finally:
        engine.update_weights({"mtp": mtp_layer()})


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_leave_no_keys_of_old_ones_to_later_sequences(
    engine: LLMEngine, found: list[FirstDraft], monkeypatch: pytest.MonkeyPatch, kv: Any
) -> None:
    """The layer's keys of a sequence that continues with old hidden states are computed after the update."""
    new = mtp_params(5)
    placed = engine._programs.place(new, donate=False)
    at_turn(monkeypatch, lambda: engine._loop.update_weights(placed, version=None, kv=kv))
    try:
        answers = run(engine, request_of("running"))
        assert len(found) > 3 and (kv == "keep" or all(correct(found, answers, new)))
        found.clear()
        answers = run(engine, request_of("later"))
        assert len(found) > 3 and all(correct(found, answers, new))
    finally:
        engine.update_weights(mtp_params())


def test_an_aborted_request_leaves_no_wrong_keys(engine: LLMEngine, found: list[FirstDraft]) -> None:
    engine.submit(request_of("left", max_tokens=30))
    updates = engine.stream("left")
    for _ in range(3):
        next(updates)
    updates.close()
    wait_until_idle(engine)
    found.clear()
    answers = run(engine, request_of("same"))
    assert len(found) > 3 and all(correct(found, answers))


@pytest.mark.slow  # two more engines
def test_quantized_pages_give_the_same_answers_and_nearly_the_same_drafts(found: list[FirstDraft]) -> None:
    answers = []
    for config in (CONFIG, MTP):
        with LLMEngine(MtpCheckpoint(), dataclasses.replace(config, cache_dtype="int8")) as engine:
            answers.append(run(engine, request_of("one"), request_of("two", PROMPT[::-1])))
    assert answers[0] == answers[1]
    assert len(found) > 10 and sum(correct(found, answers[1])) > 0.7 * len(found)


def test_a_model_without_the_layer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'tiny' has no layer for multi-token prediction"):
        LLMEngine(TinyCheckpoint(), MTP)
