"""Embeddings: pooled hidden states of whole prompts."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineStopped, GenerationError
from stack_serve import LLM
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.programs import Programs
from stack_serve.llm.vectors import finished_vectors

from .test_engine import Words
from .tiny_checkpoint import EMBED, POSITIONS, TinyCheckpoint, hidden_states, random_params

# Lengths of both buckets, more prompts than fit in a launch, and the longest prompt.
LENGTHS = (3, 16, 17, 1, POSITIONS, 5, 9, 2)
PROMPTS = [[(7 * place + step) % 31 for step in range(length)] for place, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TinyCheckpoint(tokenizer=Words()), max_sequences=4, step_tokens=32) as llm:
        yield llm


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_the_hidden_states_of_the_model(llm: LLM, pooling: Any) -> None:
    found = llm.embed(PROMPTS, pooling=pooling, normalize=False)
    assert found.dtype == np.float32 and found.shape == (len(PROMPTS), EMBED)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        hidden = hidden_states(prompt)
        np.testing.assert_allclose(vector, hidden[-1] if pooling == "last" else hidden.mean(0), atol=1e-5)
        np.testing.assert_allclose(llm.embed(prompt, pooling=pooling, normalize=False)[0], vector, atol=1e-5)


def test_texts_are_normalized_and_cut(llm: LLM) -> None:
    (whole,) = llm.embed("abc")
    np.testing.assert_allclose(whole, llm.embed([[0, 1, 2]])[0])
    assert np.linalg.norm(whole) == pytest.approx(1.0, abs=1e-6)
    (short,) = llm.embed("abc", dimensions=4)
    np.testing.assert_allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    assert not finished_vectors(np.zeros((1, 3), np.float32)).any()


def test_no_page_is_used_and_generation_goes_on(llm: LLM) -> None:
    stats = llm._engine.stats()
    llm.embed(PROMPTS)
    assert llm._engine.stats() == stats


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["ab", ""], {}, "no tokens"),
        ([[1] * (POSITIONS + 1)], {}, f"{POSITIONS + 1} tokens; the maximum is {POSITIONS}"),
        ([[31]], {}, "token 31; the model has tokens 0 to 30"),
        ([], {}, "give at least one"),
        ([[1]], {"dimensions": EMBED + 1}, f"embeddings have {EMBED}"),
    ],
)
def test_bad_prompts_and_settings_are_refused(llm: LLM, prompts: Any, options: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        llm.embed(prompts, **options)


def test_programs_are_compiled_at_the_start_and_new_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programs, "compile_all", lambda *_: None)  # of generation
    programs: list[str] = []
    config = EngineConfig(max_sequences=1, step_tokens=32, embeddings=True)
    engine = LLMEngine(TinyCheckpoint(), config, progress=lambda name, number, total: programs.append(name))
    engine.warm_up()
    assert programs == ["embed 1 16", "embed 1 32", "embed 1 48", "embed 2 16"]
    before = len(engine._pooling._compiled)
    for prompt in PROMPTS:
        engine.embed([prompt])
    assert len(engine._pooling._compiled) == before
    engine.update_weights(random_params(1))
    np.testing.assert_allclose(engine.embed([[3, 4]])[0], hidden_states([3, 4], seed=1)[-1], atol=1e-5)
    with pytest.raises(GenerationError, match="'max': expected one of 'last', 'mean'"):
        inspect.unwrap(LLMEngine.embed)(engine, [[1]], pooling="max")  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(EngineStopped):
        engine.embed([[1]])


def test_other_engines_compute_none() -> None:
    with pytest.raises(GenerationError, match="Use the engine 'llm'"):
        Engine.embed(object(), [[1]])  # type: ignore[arg-type]
