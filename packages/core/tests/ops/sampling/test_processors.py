"""Logits processors of plugins, compared with their formulas on full rows of logits in float64."""

import re
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, GenerationError, PluginError
from stack_core.abi.generation import SamplingParams
from stack_core.ops.sampling.processors import NO_TOKEN, LogitsProcessor
from stack_core.ops.sampling.row_processors import LogitsProcessors
from stack_core.ops.sampling.sampling import SamplingSettings, sample

VOCAB, ROWS, MAX_TOKENS, TEMPERATURE, FREQUENCY = 37, 5, 9, 0.7, 0.5
TokenId = Annotated[int, Field(ge=0)]


@config
class Boost:
    """Adds an amount to some tokens, or to all others."""

    amount: float
    tokens: Annotated[tuple[TokenId, ...], Field(max_length=3)] = ()
    others: bool = False


def boost(logits, params, history):
    chosen = jnp.zeros(len(logits), bool).at[params.tokens].set(True)
    return logits + jnp.where(chosen != params.others, params.amount, 0.0)


@config
class Fresh:
    """Excludes the last tokens of the continuation."""

    last: Annotated[int, Field(ge=0)] = 2


def fresh(logits, params, history):
    first = jnp.maximum(history.length - params.last, history.prompt_tokens)
    recent = jnp.arange(len(history.tokens)) >= first
    return logits.at[jnp.where(recent, history.tokens, NO_TOKEN)].set(-jnp.inf)


@config
class Flat:
    """Makes all tokens equally likely."""


PROCESSORS = LogitsProcessors(
    {
        "boost": LogitsProcessor(Boost, boost),
        "fresh": LogitsProcessor(Fresh, fresh),
        "flat": LogitsProcessor(Flat, lambda logits, params, history: jnp.zeros_like(logits)),
    }
)


@jax.jit
def draw(logits, settings, words, history, lengths, mask=None):
    processors = PROCESSORS.of_rows(words)
    return sample(logits, settings, history, lengths, mask=mask, processors=processors, candidates=True)


@jax.jit
def draw_without(logits, settings, history, lengths):
    return sample(logits, settings, history, lengths, candidates=True)


def settings_of(params, *, prompt_tokens):
    rows = [
        SamplingSettings.row(each, seed=(0, row), end_tokens=(), prompt_tokens=prompt_tokens)
        for row, each in enumerate(params)
    ]
    return jax.tree.map(lambda *values: np.stack(values), *rows)


def by_hand(logits, requested, continuation):
    """The logits after the penalties and the processors, in their order."""
    changed = logits.astype(np.float64)
    np.add.at(changed, continuation, -FREQUENCY)
    if (boosted := requested.get("boost")) is not None:
        chosen = np.isin(np.arange(VOCAB), boosted.get("tokens", ()))
        changed += np.where(chosen != boosted.get("others", False), boosted["amount"], 0.0)
    if (last := requested.get("fresh")) is not None:
        changed[continuation[len(continuation) - min(last, len(continuation)) :]] = -np.inf
    if "flat" in requested:
        changed[np.isfinite(changed)] = 0.0
    return changed


def random_request(source) -> dict[str, Any]:
    tokens = source.integers(0, VOCAB, source.integers(0, 4)).tolist()
    boosted = {"amount": float(source.normal(0, 4)), "tokens": tokens, "others": bool(source.integers(2))}
    requests: list[dict[str, Any]] = [{}, {"boost": boosted}, {"fresh": int(source.integers(0, 12))}, {"flat": {}}]
    return requests[source.integers(4)] | requests[source.integers(4)]


@given(st.integers(0, 2**32 - 1))
def test_a_processor_is_its_formula_on_the_full_logits(seed: int) -> None:
    source, prompt_tokens = np.random.default_rng(seed), 2
    logits = source.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    # Tokens behind the length are rejected drafts, which must not count.
    history = source.integers(0, VOCAB, (ROWS, MAX_TOKENS)).astype(np.int32)
    lengths = source.integers(prompt_tokens, MAX_TOKENS + 1, ROWS).astype(np.int32)
    params = [
        SamplingParams(
            temperature=TEMPERATURE,
            frequency_penalty=FREQUENCY,
            logprobs=0,
            logprobs_of="processed",
            logits_processors=random_request(source),
        )
        for _ in range(ROWS)
    ]
    words = np.stack([PROCESSORS.packed(each.logits_processors) for each in params])
    settings = settings_of(params, prompt_tokens=prompt_tokens)
    sampled = draw(logits, settings, words, history, lengths)
    without = draw_without(logits, settings, history, lengths)
    assert np.all(sampled.ok)
    for row, each in enumerate(params):
        continuation = history[row, prompt_tokens : lengths[row]]
        expected = by_hand(logits[row], each.logits_processors, continuation) / TEMPERATURE
        expected -= np.logaddexp.reduce(expected)
        token = int(sampled.tokens[row])
        np.testing.assert_allclose(sampled.logprobs[row], expected[token], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(sampled.candidates[row], np.isfinite(expected))
        if not each.logits_processors:
            for one, other in zip(jax.tree.leaves(sampled), jax.tree.leaves(without), strict=True):
                np.testing.assert_array_equal(np.asarray(one)[row], np.asarray(other)[row])


def test_excluded_tokens_stay_excluded() -> None:
    """By the constraint of the first row, by `min_tokens` of the second; the third row has nothing excluded."""
    allowed = np.full((3, 2), -1, np.int32)
    allowed[0] = [1 << 3 | 1 << 9, 1]
    plain: dict[str, Any] = {"logits_processors": {"flat": {}}}
    params = [
        SamplingParams(**plain),
        SamplingParams(**plain, min_tokens=1, stop_tokens=(0, 36)),
        SamplingParams(**plain),
    ]
    logits = np.tile(np.linspace(-4, 4, VOCAB, dtype=np.float32), (3, 1))
    words = np.stack([PROCESSORS.packed(each.logits_processors) for each in params])
    history, lengths = np.zeros((3, MAX_TOKENS), np.int32), np.full(3, 2, np.int32)
    sampled = draw(logits, settings_of(params, prompt_tokens=2), words, history, lengths, allowed)
    found = [np.flatnonzero(row).tolist() for row in np.asarray(sampled.candidates)]
    assert found == [[3, 9, 32], list(range(1, 36)), list(range(VOCAB))]


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        (
            {"bost": {}},
            "processor 'bost'. Did you mean 'boost'? The engine was started with: boost, fresh, flat",
        ),
        ({"boost": {}}, "boost.amount is missing"),
        ({"boost": 1.0}, "boost is 1.0; a mapping with keys of Boost was expected"),
        ({"boost": {"amount": "much"}}, "boost.amount: Input should be a valid number (given 'much')"),
        ({"boost": {"amount": 1.0, "token": [1]}}, "Unknown key 'boost.token'. Did you mean 'tokens'?"),
        ({"boost": {"amount": 1.0, "tokens": [1, 2, 3, 4]}}, "at most 3 items"),
        ({"boost": {"amount": 1.0, "tokens": [-1]}}, "greater than or equal to 0"),
        (
            {"boost": {"amount": 1.0, "tokens": [2**31]}},
            "tokens is (2147483648,); expected numbers from -2147483648",
        ),
        ({"fresh": -1}, "greater than or equal to 0 (given -1)"),
        ({"flat": {"n": 1}}, "Unknown key 'flat.n'"),
        ({"boost": {"amount": "x" * 10_000}}, "xxx..."),
    ],
)
def test_wrong_names_and_parameters_are_refused(requested: dict[str, Any], says: str) -> None:
    with pytest.raises(GenerationError, match=re.escape(says)) as caught:
        PROCESSORS.packed(requested)
    assert caught.value.parameter == "logits_processors"
    assert len(str(caught.value)) < 700


@config
class Unbounded:
    tokens: tuple[int, ...] = ()


@config
class Text:
    text: str = ""


@pytest.mark.parametrize(
    ("params", "says"), [(Unbounded, "tokens needs a max_length"), (Text, "text has the type .*str.*; expected bool")]
)
def test_parameters_without_an_array_are_refused(params: type, says: str) -> None:
    with pytest.raises(ConfigError, match=f"Logits processor 'mine': {says}"):
        LogitsProcessors({"mine": LogitsProcessor(params, fresh)})


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda logits, params, history: logits[1:], r"'mine' returned float32\[36\]; expected float32\[37\]"),
        (lambda logits, params, history: logits.astype(jnp.bfloat16), r"'mine' returned bfloat16\[37\]"),
        (lambda logits, params, history: logits + params.weight, "'mine' cannot be traced: AttributeError"),
    ],
)
def test_a_function_that_cannot_process_is_refused_before_the_first_request(function: Any, says: str) -> None:
    PROCESSORS.check(VOCAB, MAX_TOKENS)
    with pytest.raises(PluginError, match=says):
        LogitsProcessors({"mine": LogitsProcessor(Flat, function)}).check(VOCAB, MAX_TOKENS)
