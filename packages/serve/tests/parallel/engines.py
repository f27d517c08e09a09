"""Engines in processes of their own, which do not import the tests."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import EngineStats, GenerationRequest
from stack_core.text.embeddings import EmbeddingSettings
from stack_serve.llm import engine as engine_module
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.encoder_engine import EncoderEngine
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.handover import ExportedPages
from stack_serve.llm.limits import Limits
from stack_serve.llm.lockstep import connect_group
from stack_serve.llm.speculation import Speculation
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.devices import EngineDevices
from stack_serve.parallel.engine import ParallelEngine

from ..llm import tiny_checkpoint, tiny_mtp
from ..openai import fake_engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, max_waiting=60)
SLOW, LATE = 120, 121  # first tokens of prompts: pauses between tokens, and before the first
LATE_S = 1.0
WEIGHTS = ("shift", "unplaced_by", "unused_by", "keeps_awake", "lost_by")
MAX_TOKENS = 10_000


def weights(**values: int) -> dict[str, np.ndarray]:
    """Parameters of a `LetterEngine`; no engine has the number -1."""
    return {name: np.array(values.get(name, -1 if name != "shift" else 0), np.int32) for name in WEIGHTS}


def script(request: GenerationRequest, index: int) -> Iterator[int]:
    if request.prompt[0] == LATE:
        time.sleep(LATE_S)
    for token in fake_engine.letters(request, index):
        time.sleep(0.02 * (request.prompt[0] == SLOW))
        yield token


class LetterEngine(fake_engine.FakeEngine):
    """The fake engine with adapters and weights: the path "bad-1" cannot be read by engine 1.

    Its weights shift the letters. The engine `unplaced_by` cannot hold them, and the engine `unused_by` cannot take
    them into use unless it has just started. With them, the engine `keeps_awake` cannot sleep, and the engine `lost_by`
    cannot hold them again once it has slept.

    Its statistics have the numbers of its requests and of its adapters, and as steps the pages that it received.
    """

    limits = Limits(MAX_TOKENS, 64, fake_engine.VOCAB_SIZE, 1, has_tokenizer=True)

    def __init__(self) -> None:
        super().__init__(self._shifted, max_tokens=MAX_TOKENS)
        self.parameters = {name: jax.ShapeDtypeStruct((), "int32") for name in WEIGHTS}
        self._adapters = {"given": "given"}
        self.imported = self._version = self._shift = 0
        self._restless = -1

    def _shifted(self, request: GenerationRequest, index: int) -> Iterator[int]:
        for token in script(request, index):
            yield 97 + (token - 97 + self._shift) % 26

    def _next(self, made: Any) -> Any:
        return replace(super()._next(made), weights_versions=(self._version,))

    def place_weights(self, params: Any, *, donate: bool) -> dict[str, int]:
        assert donate
        number = int(os.environ["ENGINE"])
        if params.get("unplaced_by", -1) == number or (self.slept and params.get("lost_by", -1) == number):
            raise MemoryError("no memory for weights")
        return {name: int(value) for name, value in params.items()}

    def use_weights(self, params: dict[str, int], *, version: int, kv: str) -> None:
        if params.get("unused_by") == int(os.environ["ENGINE"]) and self._version:
            raise MemoryError("no memory for a swap")
        self._shift, self._version = params.get("shift", self._shift), version
        self._restless = params.get("keeps_awake", self._restless)

    def sleep(self, level: Any = 1) -> None:
        if self._restless == int(os.environ["ENGINE"]):
            raise GenerationError("cannot sleep")
        super().sleep(level)
        if level == 2:
            self._shift, self._restless = 0, -1

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
                "weights_version": self._version,
            }
        )


def open_letters(progress: Callable[[str, int, int], None]) -> LetterEngine:
    progress("fake", 1, 1)
    return LetterEngine()


def open_tiny(config: EngineConfig, progress: Any) -> LLMEngine:
    return LLMEngine(tiny_checkpoint.TinyCheckpoint(), config, progress=progress)


@dataclass(frozen=True)
class ShardedCheckpoint(tiny_checkpoint.TinyCheckpoint):
    """The tiny model with the features of its layers and its head sharded over `tensor`."""

    def shardings(self, mesh: Any) -> Any:
        specs = {
            "embedding": PartitionSpec(),
            "layers": {"mix": PartitionSpec(None, None, "tensor")},
            "head": PartitionSpec("tensor"),
        }
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def open_sharded(config: EngineConfig, progress: Any) -> LLMEngine:
    return LLMEngine(ShardedCheckpoint(), config, progress=progress, group=connect_group())


def open_speculative(config: EngineConfig, progress: Any) -> LLMEngine:
    """Opens the tiny model in the process of an engine, where every step without prompts verifies drafts."""
    Speculation._cost = lambda *_: 1e-9  # type: ignore[method-assign]  # pyrefly: ignore
    Speculation._drafting_cost = lambda *_: 0.0  # type: ignore[method-assign]  # pyrefly: ignore
    engine_module.open_for_generation = lambda _: tiny_checkpoint.TinyCheckpoint()  # pyrefly: ignore
    return LLMEngine(tiny_mtp.MtpCheckpoint(), config, progress=progress)


@dataclass(frozen=True)
class TinyEncoder(tiny_checkpoint.TinyCheckpoint):
    name: str = "tiny-encoder"
    embedding: EmbeddingSettings | None = None
    generates: bool = False


def open_encoder(config: EngineConfig, progress: Any) -> EncoderEngine:
    return EncoderEngine(TinyEncoder(), config, progress=progress)


def encoder_engine(config: EngineConfig) -> ParallelEngine:
    return _parallel(partial(open_encoder, config), config, 2)


def letter_engine(engines: int = 2, **settings: Any) -> ParallelEngine:
    return _parallel(open_letters, CONFIG, engines, **settings)


def tiny_engine(config: EngineConfig = CONFIG, engines: int = 2, **settings: Any) -> ParallelEngine:
    return _parallel(partial(open_tiny, config), config, engines, **settings)


def speculative_engine(config: EngineConfig, **settings: Any) -> ParallelEngine:
    return _parallel(partial(open_speculative, config), config, **settings)


def _parallel(open_engine: Any, config: EngineConfig, engines: int, **settings: Any) -> ParallelEngine:
    for module in (sys.modules[__name__], tiny_checkpoint, tiny_mtp, fake_engine):
        cloudpickle.register_pickle_by_value(module)
    parallel = ParallelConfig(data_parallel=engines, **settings)
    devices = [EngineDevices({"ENGINE": str(number)}) for number in range(parallel.engines)]
    return ParallelEngine(open_engine, config, parallel, devices=devices)


def sharded_engine(config: EngineConfig, hosts: int = 2, open_engine: Any = open_sharded) -> ParallelEngine:
    for module in (sys.modules[__name__], tiny_checkpoint, tiny_mtp, fake_engine):
        cloudpickle.register_pickle_by_value(module)
    return ParallelEngine(partial(open_engine, config), config, ParallelConfig(hosts=hosts))
