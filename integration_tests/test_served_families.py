"""Every family whose states the paged cache carries is served, in float and as w8a8, as it answers without a cache."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.errors import StackError
from stack_core.plugins import registries
from stack_quant.model import quantize_model
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_train.generative import generative_checkpoint

from .generation import Reference, complete, greedy

SIZES = {"vocab_size": 97, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "layers": 3, "max_positions": 64}
SIZES |= {"dtype": "float32", "initializer_std": 0.3}
EXPERTS = {"experts": 4, "active_experts": 2}
# Windows are shorter than prompts, so that pages fall out of them; each tuple has layers of both kinds.
FAMILIES = {
    "llama": {},
    "mistral": {"window": 7},
    "qwen2": {"window": 6, "full_layers": 1},
    "qwen3": {},
    "mixtral": {"window": 9, **EXPERTS},
    "qwen3_moe": {"dense_layers": (0,), "expert_mlp": 24, **EXPERTS},
    "gemma3": {"window": 6, "period": 2, "query_scalar": 24, "logit_softcap": 5.0},
}
DEFAULT = {"mixtral": "float", "gemma3": "w8a8"}
CASES = [
    pytest.param(family, rules, marks=[] if DEFAULT.get(family) == rules else pytest.mark.slow)
    for family in FAMILIES
    for rules in ("float", "w8a8")
]
W8A8 = [{"path": ".*", "weights": "int8", "activations": "int8"}]
TOLERANCE = {"float": 0.0, "w8a8": 0.1}  # codes of activations: sums in another order take one to its neighbour
PAIR = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=4)


def model_of(family, sizes):
    entry = registries.models[family]
    known = {field.name for field in dataclasses.fields(entry.config_class)}
    config = entry.config_class(**{name: value for name, value in {**SIZES, **sizes}.items() if name in known})
    return jax.jit(lambda: entry.build(config, key=jax.random.key(0)))()


def opened(model):
    nowhere = Path("nowhere")
    return generative_checkpoint(model, name="tiny", tokenizer=nowhere, origin=nowhere)


@pytest.mark.parametrize(("family", "rules"), CASES)
def test_the_engine_answers_as_the_model_does(family, rules):
    model = model_of(family, FAMILIES[family])
    if rules == "w8a8":
        sample = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}
        model = quantize_model(model, W8A8, sample)
    checkpoint = opened(model)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, SIZES["vocab_size"], length).tolist() for length in (3, 30)]
    with LLMEngine(checkpoint, PAIR) as engine:
        found = complete(engine, prompts, greedy(10))
    reference = Reference(checkpoint)
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        assert len(continuation.tokens) == 10
        reference.assert_most_likely(prompt, continuation.tokens, tolerance=TOLERANCE[rules])


@pytest.mark.parametrize(("family", "state"), [("deepseek_v3", "latent"), ("qwen3_next", "recurrent")])
def test_states_that_no_page_holds_are_refused_by_name(family, state):
    with pytest.raises(StackError, match=f"(?i){state}"):
        LLMEngine(opened(model_of(family, {"layers": 4, **EXPERTS, "expert_mlp": 24})), PAIR)
