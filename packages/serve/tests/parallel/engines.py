"""Engines in processes of their own, which do not import the tests."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import jax.numpy as jnp

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import EngineStats, GenerationRequest
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.handover import ExportedPages
from stack_serve.llm.limits import Limits
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.devices import EngineDevices
from stack_serve.parallel.engine import ParallelEngine

from ..llm import tiny_checkpoint
from ..openai import fake_engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, max_waiting=60)
SLOW, LATE = 120, 121  # first tokens of prompts: pauses between tokens, and before the first
LATE_S = 1.0


def script(request: GenerationRequest, index: int) -> Iterator[int]:
    if request.prompt[0] == LATE:
        time.sleep(LATE_S)
    for token in fake_engine.letters(request, index):
        time.sleep(0.02 * (request.prompt[0] == SLOW))
        yield token


class LetterEngine(fake_engine.FakeEngine):
    """The fake engine with adapters: the path "bad-1" cannot be read by engine 1.

    Its statistics have the numbers of its requests and of its adapters, and as steps the pages that it received.
    """

    limits = Limits(fake_engine.MAX_TOKENS, 64, fake_engine.VOCAB_SIZE, 1, has_tokenizer=True)

    def __init__(self) -> None:
        super().__init__(script)
        self._adapters = {"given": "given"}
        self.imported = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def memory(self) -> str:
        return "little"

    def compile_constraint(self, constraint: Any) -> None:
        raise GenerationError("no constraints here", parameter="constraint")

    def load_adapter(self, name: str, adapters: Any) -> None:
        if adapters == f"bad-{os.environ['ENGINE']}":
            raise GenerationError("cannot be read", parameter="adapter")
        self._adapters[name] = adapters

    def unload_adapter(self, name: str) -> None:
        if self._adapters.pop(name, None) is None:
            raise GenerationError("is unknown", parameter="adapter")

    def prepare_handover(self) -> None: ...

    def export_pages(self, request: GenerationRequest) -> ExportedPages:
        pages = (len(request.prompt) - 1) // CONFIG.page_tokens
        return ExportedPages(pages, [(jnp.array(request.prompt), jnp.array([1.5], "bfloat16"))])

    def import_pages(self, request: GenerationRequest, exported: ExportedPages) -> None:
        [(tokens, half)] = exported.blocks
        assert tuple(tokens.tolist()) == request.prompt and half.dtype == "bfloat16" and half[0] == 1.5
        self.imported += exported.pages

    def stats(self) -> EngineStats:
        counts = dict(vars(super().stats()))
        return EngineStats(
            **{
                **counts,
                "prompt_tokens": len(self.submitted),
                "preemptions": len(self._adapters),
                "steps": self.imported,
            }
        )


def open_letters(progress: Callable[[str, int, int], None]) -> LetterEngine:
    progress("fake", 1, 1)
    return LetterEngine()


def open_tiny(config: EngineConfig, progress: Any) -> LLMEngine:
    return LLMEngine(tiny_checkpoint.TinyCheckpoint(), config, progress=progress)


def letter_engine(engines: int = 2, **settings: Any) -> ParallelEngine:
    return _parallel(open_letters, CONFIG, engines, **settings)


def tiny_engine(config: EngineConfig = CONFIG, engines: int = 2, **settings: Any) -> ParallelEngine:
    return _parallel(partial(open_tiny, config), config, engines, **settings)


def _parallel(open_engine: Any, config: EngineConfig, engines: int, **settings: Any) -> ParallelEngine:
    for module in (sys.modules[__name__], tiny_checkpoint, fake_engine):
        cloudpickle.register_pickle_by_value(module)
    parallel = ParallelConfig(data_parallel=engines, **settings)
    devices = [EngineDevices({"ENGINE": str(number)}) for number in range(parallel.engines)]
    return ParallelEngine(open_engine, config, parallel, devices=devices)
