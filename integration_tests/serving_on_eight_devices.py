"""Engines split over several devices; `test_serving.py` runs this in a process that has eight.

The argument `all` adds engines with more key heads than devices, in float, and with sizes that cannot be divided.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation import Reference, complete, greedy

from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_quant.model import quantize_model
from stack_quant.rules import Rule
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.llama import LlamaConfig

WIDTHS = {"vocab_size": 96, "embed": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "mlp": 64}
WIDTHS |= {"max_positions": 64, "initializer_std": 0.3, "dtype": "float32"}
CONFIG = LlamaConfig(**WIDTHS)
SIZES = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=4)
SAMPLE = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}


def check(tensor: int, *, expert: int = 1, quantized: str | None = None, config: Any = CONFIG, **sizes: int) -> None:
    config = dataclasses.replace(config, **sizes)
    model = jax.jit(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))()
    if quantized is not None:
        model = quantize_model(model, [Rule(path=".*", weights=quantized, tile_size=8)], SAMPLE)
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(model, config, name="tiny", tokenizer=nowhere, origin=nowhere)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, config.vocab_size, length).tolist() for length in (3, 30)]
    with LLMEngine(checkpoint, dataclasses.replace(SIZES, tensor=tensor, expert=expert)) as engine:
        found = complete(engine, prompts, [greedy(12), greedy(10)])
        pools, params = jax.tree.leaves(engine._programs._layers), engine._programs.params
    assert all(len(pool.sharding.device_set) == tensor * expert for pool in pools)
    if expert > 1:
        experts = [
            leaf for path, leaf in jax.tree.leaves_with_path(params) if "expert_gate" in jax.tree_util.keystr(path)
        ]
        # [experts, embed, width] of a layer.
        assert experts and all(leaf.addressable_shards[0].data.shape[-3] == 4 // expert for leaf in experts)
    reference = Reference(checkpoint)
    for prompt, (continuation,), count in zip(prompts, found, (12, 10), strict=True):
        assert len(continuation.tokens) == count, continuation.updates[-1]
        reference.assert_most_likely(prompt, continuation.tokens)


def check_refused(message: str, *, tensor: int = 1, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tensor, **options)


assert len(jax.devices()) == 8
check(8, quantized="int8", kv_heads=8, layers=1)
if "all" in sys.argv:
    check(2, quantized="int8")
    check(8, kv_heads=8)
    mixture = registries.models["mixtral"].config_class(**WIDTHS, experts=4, active_experts=2)
    check(2, expert=4, config=mixture)
    check(1, expert=2, config=mixture, quantized="int8")
    for expert, config in ((3, mixture), (2, CONFIG)):
        check_refused("is divided by experts", expert=expert, config=config)
    check_refused("weights of 4 bits", expert=1, tensor=2, quantized="int4")
    check(4, kv_heads=2, vocab_size=97, mlp=50)  # what is divided by nothing is split over nothing
