"""The engine of encoders: vectors of whole texts, and a refusal of everything else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, ConversionError, EngineStopped, GenerationError
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.text.embeddings import EmbeddingSettings
from stack_serve import LLM
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.encoder_engine import EncoderEngine
from stack_serve.llm.truncation import truncated_tokens

from .test_engine import Words
from .tiny_checkpoint import TinyCheckpoint, TinyModel, hidden_states, random_params

LONGEST = 29  # not a power of two, so that the last bucket is cut
CLS, SEP = 29, 30
CLS_POOLING = EmbeddingSettings(pooling="cls", normalize=False)


class Letters(Words):
    """Letters between two special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = [ord(letter) - ord("a") for letter in text]
        return [CLS, *tokens, SEP] if add_special_tokens else tokens


@dataclass(frozen=True)
class TinyEncoder(TinyCheckpoint):
    name: str = "tiny-encoder"
    max_positions: int = LONGEST
    embedding: EmbeddingSettings | None = CLS_POOLING
    generates: bool = False


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TinyEncoder(tokenizer=Letters()), step_tokens=64) as llm:
        yield llm


def test_the_settings_of_the_checkpoint_are_the_defaults(llm: LLM) -> None:
    prompts = [[CLS, 3, SEP], list(range(LONGEST)), [CLS, 1, 2, 3, SEP]]
    for found, tokens in zip(llm.embed(prompts), prompts, strict=True):
        np.testing.assert_allclose(found, hidden_states(tokens)[0], atol=1e-5)
    for pooling, take in (("mean", np.mean), ("last", lambda hidden, axis: hidden[-1])):
        found = llm.embed(prompts, pooling=pooling, normalize=False)[2]
        np.testing.assert_allclose(found, take(hidden_states(prompts[2]), axis=0), atol=1e-5)
    assert np.linalg.norm(llm.embed("abc", normalize=True)) == pytest.approx(1.0, abs=1e-6)


def test_long_texts_are_cut_on_request_only(llm: LLM) -> None:
    with pytest.raises(GenerationError, match=f"31 tokens; the maximum is {LONGEST}"):
        llm.embed("abc" * 9 + "ab")
    (whole,) = llm.embed("abc" * 10, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(whole, hidden_states([CLS, *[0, 1, 2] * 9, SEP])[0])
    for found, tokens in ((llm.embed("abcd", truncate_prompt_tokens=4), [CLS, 0, 1, SEP]),):
        np.testing.assert_allclose(found[0], hidden_states(tokens)[0], atol=1e-5)
    with pytest.raises(GenerationError, match="truncate_prompt_tokens=0"):
        llm.embed("abcd", truncate_prompt_tokens=0)


def test_which_tokens_remain() -> None:
    assert truncated_tokens((1, 2, 3, 9), 3, (9,)) == (1, 2, 9)
    assert truncated_tokens((1, 2, 3, 9), 1, (9,)) == (1,)
    assert truncated_tokens((1, 2, 3, 4), 3, (9,)) == (1, 2, 3)
    assert truncated_tokens((1, 2, 3, 4), 3, ()) == (1, 2, 3)
    assert truncated_tokens((1, 2, 3, 4), 3, None) == (2, 3, 4)
    assert truncated_tokens((1, 2, 3, 4), 4, None) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", ["generate", "chat", "stream"])
def test_an_encoder_generates_nothing(llm: LLM, name: str) -> None:
    with pytest.raises(GenerationError, match="tiny-encoder is an encoder: it embeds texts and generates none"):
        list(getattr(llm, name)("ab"))


def test_weights_are_replaced_and_a_closed_engine_refuses() -> None:
    engine = EncoderEngine(TinyEncoder(), EngineConfig(step_tokens=32, max_tokens=16, embeddings=True))
    engine.prepare()
    engine.start()
    compiled = len(engine._programs._compiled)
    assert compiled == 2  # one row, and as many as a launch holds
    engine.update_weights({"embedding": random_params(1)["embedding"]})
    (found,) = engine.embed([[1, 2]], pooling="last")
    params = {**random_params(0), "embedding": random_params(1)["embedding"]}
    expected = TinyModel(params)(jnp.array([[1, 2]]), jnp.arange(2)[None]).hidden[0, -1]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(engine._programs._compiled) == compiled and engine.stats().prompt_tokens == 2
    assert engine.stats().weights_version == 1
    with pytest.raises(ConversionError, match="unknown"):
        engine.update_weights({"other": np.ones(2)})
    request = GenerationRequest(request_id="1", prompt=(1,), sampling=SamplingParams())
    with pytest.raises(GenerationError, match="generates none"):
        engine.submit(request)
    with pytest.raises(GenerationError, match="the maximum is 16"):
        engine.embed([[1] * 17])
    with pytest.raises(GenerationError, match="give at least one"):
        engine.embed([])
    assert engine.memory().startswith("parameters ")
    engine.close()
    with pytest.raises(EngineStopped):
        engine.embed([[1]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pages": 8, "prefix_caching": True}, "prefix_caching.* is an encoder, on which only embeddings, max_tokens"),
        ({"max_tokens": 30}, "max_tokens=30 is more than the 29 tokens"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderEngine(TinyEncoder(), EngineConfig(**settings))
