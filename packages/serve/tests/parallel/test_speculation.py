"""Several engines that verify drafts answer as one engine without drafts."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine

from ..llm.tiny_mtp import MtpCheckpoint, mtp_params
from .engines import speculative_engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4)
METHODS: dict[str, Any] = {"mtp": {"speculation": SpeculationConfig(method="mtp", tokens=3)}}
METHODS["draft"] = {"speculation": SpeculationConfig(method="draft", tokens=3), "draft_model": "TINY"}
ENGINES: list[tuple[str, dict[str, int]]] = [
    ("mtp", {"engines": 2}),
    ("mtp", {"engines": 1, "prefill_engines": 1}),
    ("draft", {"engines": 2}),
]


def answers(engine: Any, seed: int) -> list[list[int]]:
    requests = [
        GenerationRequest(
            request_id=f"{seed} {number}",
            prompt=tuple(range(number + seed, number + seed + 9)),
            sampling=SamplingParams(max_tokens=16, seed=number, temperature=number / 4),
        )
        for number in range(6)
    ]
    for request in requests:
        engine.submit(request)
    return [[token for update in engine.stream(each.request_id) for token in update.tokens] for each in requests]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), ENGINES)
def test_answers_are_those_of_one_engine_before_and_after_new_weights(method: str, settings: Any) -> None:
    new = {name: value for name, value in mtp_params(3).items() if name != "layers"}
    with (
        LLMEngine(MtpCheckpoint(), CONFIG) as one,
        speculative_engine(replace(CONFIG, **METHODS[method]), **settings) as engine,
    ):
        assert answers(engine, 1) == answers(one, 1)
        for each in (one, engine):
            each.update_weights(jax.tree.map(np.array, new))
        assert answers(engine, 2) == answers(one, 2)
        generating = engine.engine_stats()[: settings["engines"]]
        assert all(stats is not None and stats.drafted_tokens > 0 for stats in generating)
        if "prefill_engines" in settings:
            assert generating[0].prefix_hits_tokens == 12 * 8
