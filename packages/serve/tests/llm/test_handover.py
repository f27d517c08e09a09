"""Pages that one engine computes and another one uses."""

from typing import Any

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.handover import ExportedPages

from .tiny_checkpoint import TinyCheckpoint

SIZES: Any = {"max_sequences": 2, "step_tokens": 48, "page_tokens": 4}


def answer(engine: LLMEngine, name: str, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """Tokens, and the number of tokens of the prompt that were cached."""
    engine.submit(GenerationRequest(request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=6, seed=1)))
    updates = list(engine.stream(name))
    return [token for update in updates for token in update.tokens], updates[-1].cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
def test_pages_are_found_by_an_engine_that_did_not_compute_them(cache_dtype: Any) -> None:
    config = EngineConfig(**SIZES, cache_dtype=cache_dtype, pages=14)
    prompt = tuple(range(1, 23))
    request = GenerationRequest(request_id="", prompt=prompt, sampling=SamplingParams())
    with LLMEngine(TinyCheckpoint(), config) as one, LLMEngine(TinyCheckpoint(), config) as other:
        one.prepare_handover()
        expected = answer(one, "a", prompt)
        assert expected[1] == 0
        exported = one.export_pages(request)
        assert exported.pages == 5 and len(exported.blocks) == 1
        copied = ExportedPages(exported.pages, [tuple(np.asarray(array) for array in exported.blocks[0])])
        # Another prompt uses two of the pages, which keep their contents.
        assert answer(other, "b", (*prompt[:8], 30, 30))[1] == 0
        other.import_pages(request, copied)
        assert other.stats().used_pages == 0
        assert answer(other, "c", prompt) == (expected[0], 20)
        # The keys were read, not computed: with other keys the answer is another one.
        wrong = ExportedPages(5, [tuple(np.roll(array, 7, axis=1) for array in copied.blocks[0])])
        with LLMEngine(TinyCheckpoint(), config) as third:
            third.import_pages(request, wrong)
            assert answer(third, "d", prompt)[0] != expected[0]
            # Free pages are used, at most.
            rest = ExportedPages(5, copied.blocks)
            longer = GenerationRequest(request_id="", prompt=tuple(range(2, 24)), sampling=SamplingParams())
            for _ in range(4):
                third.import_pages(longer, rest)
            assert third.stats().used_pages == 0


def test_an_engine_without_prefixes_takes_no_pages() -> None:
    engine = LLMEngine(TinyCheckpoint(), EngineConfig(**SIZES, prefix_caching=False))
    with pytest.raises(ConfigError, match=r"no prefix cache.*Leave out prefill_engines"):
        engine.prepare_handover()


def test_an_engine_with_a_draft_model_takes_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack_serve.llm.engine.open_for_generation", lambda _: TinyCheckpoint())
    engine = LLMEngine(TinyCheckpoint(), EngineConfig(**SIZES, speculation="draft", draft_model="DRAFT"))
    with pytest.raises(ConfigError, match=r"a draft model.*Leave out prefill_engines"):
        engine.prepare_handover()
