"""Engines split over several devices; `test_serving.py` runs this in a process that has eight.

The argument `all` adds engines with more key heads than devices, and in float.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from generation import Reference, complete, greedy

from stack_quant.model import quantize_model
from stack_quant.rules import Rule
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.llama import FAMILY, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=96,
    embed=32,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=8,
    mlp=64,
    max_positions=64,
    initializer_std=0.3,
    dtype="float32",
)
SIZES = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=4)
SAMPLE = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}


def check(tensor: int, *, quantized: bool = False, **sizes: int) -> None:
    config = dataclasses.replace(CONFIG, **sizes)
    model = jax.jit(lambda: FAMILY.build(config, key=jax.random.key(0)))()
    if quantized:
        model = quantize_model(model, [Rule(path=".*", weights="int4", tile_size=8)], SAMPLE)
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(model, config, name="tiny", tokenizer=nowhere, origin=nowhere)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, config.vocab_size, length).tolist() for length in (3, 30)]
    with LLMEngine(checkpoint, dataclasses.replace(SIZES, tensor=tensor)) as engine:
        found = complete(engine, prompts, [greedy(12), greedy(10)])
        pools = jax.tree.leaves(engine._programs._layers)
    assert all(len(pool.sharding.device_set) == tensor for pool in pools)
    reference = Reference(checkpoint)
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        reference.assert_most_likely(prompt, continuation.tokens)


assert len(jax.devices()) == 8
check(8, quantized=True, kv_heads=8)
if "all" in sys.argv:
    check(2, quantized=True)
    check(8, kv_heads=8)
check(4, kv_heads=2, vocab_size=97, mlp=50)  # what is divided by nothing is split over nothing
