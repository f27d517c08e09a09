"""Every family whose states the paged cache carries is served, in float and as w8a8, as it answers without a cache."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_quant.model import quantize_model
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.speculation import Speculation
from stack_train.generation.generative import generative_checkpoint
from stack_train.vision.gemma4_tower import Gemma4TowerConfig
from stack_train.vision.pixtral_tower import PixtralTowerConfig
from stack_train.vision.qwen2_5_tower import Qwen25TowerConfig
from stack_train.vision.qwen_tower import QwenTowerConfig
from stack_train.vision.siglip import SiglipConfig

from .generation import Reference, complete, greedy

SIZES = {"vocab_size": 97, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "layers": 3, "max_positions": 64}
SIZES |= {"dtype": "float32", "initializer_std": 0.3}
EXPERTS = {"experts": 4, "active_experts": 2}
# Windows are shorter than prompts, so that pages fall out of them; each tuple has layers of both kinds.
FAMILIES = {
    "llama": {},
    "mistral": {"layers": 2, "window": 7},
    "qwen2": {"window": 6, "full_layers": 1},
    "qwen3": {},
    "mixtral": {"window": 9, **EXPERTS},
    "qwen3_moe": {"dense_layers": (0,), "expert_mlp": 24, **EXPERTS},
    "gemma3": {"window": 6, "period": 2, "query_scalar": 24, "logit_softcap": 5.0},
    "gemma3_vision": {
        "window": 6,
        "period": 2,
        "query_scalar": 24,
        "image_tokens": 4,
        "vision": SiglipConfig(embed=14, heads=2, mlp=18, layers=2, image_size=23, patch=4),
    },
    "qwen2_5_vl": {
        "rope_sections": (2, 1, 1),
        "vision": Qwen25TowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, window=12),
    },
    "qwen3_vl": {
        "head_dim": 8,
        "rope_sections": (2, 1, 1),
        "vision": QwenTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, position_side=3, deepstack=(0,)),
    },
    "qwen3_vl_moe": {
        "head_dim": 8,
        "rope_sections": (2, 1, 1),
        "dense_layers": (0,),
        "expert_mlp": 24,
        "vision": QwenTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, position_side=3, deepstack=(0, 1)),
        **EXPERTS,
    },
    "gemma4": {
        "layers": 4,
        "head_dim": 10,
        "global_layers": (1, 3),
        "window": 6,
        "global_head_dim": 16,
        "global_kv_heads": 1,
        "keys_as_values": True,
        "shared_layers": 2,
        "wide_shared_mlp": True,
        "per_layer_input": 6,
        "logit_softcap": 5.0,
    },
    "gemma4_vision": {
        "layers": 4,
        "head_dim": 10,
        "global_layers": (1, 3),
        "window": 6,
        "global_head_dim": 16,
        "shared_layers": 2,
        "per_layer_input": 6,
        "vision": Gemma4TowerConfig(embed=16, heads=2, head_dim=8, mlp=18, layers=2, patch=3, positions=9),
    },
    "gemma2": {"window": 6, "query_scalar": 24},
    "olmo2": {},
    "gpt_oss": {"layers": 2, "window": 6, **EXPERTS},
    "deepseek_v3": {"kv_heads": None, "query_rank": 12, "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    | {"layers": 2, "expert_mlp": 24, "mtp_layers": 1, **EXPERTS},
    "deepseek_v32": {"kv_heads": None, "query_rank": 12, "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    | {"layers": 2, "expert_mlp": 24, "mtp_layers": 1, "index_heads": 6, "index_dim": 8, "index_count": 7, **EXPERTS},
    "glm_moe_dsa": {"kv_heads": None, "query_rank": 12, "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    | {"layers": 2, "expert_mlp": 24, "index_heads": 6, "index_dim": 8, "index_count": 7, **EXPERTS},
    "deepseek_v4": {"kv_heads": None, "head_dim": 10, "query_rank": 12, "rope_dim": 6, "output_groups": 2, "window": 6}
    | {"layers": 4, "kinds": ("window", "sparse", "heavy", "sparse"), "sparse_rate": 3, "heavy_rate": 5, "mlp": 24}
    | {"output_rank": 7, "index_heads": 5, "index_dim": 8, "index_count": 2, "streams": 3, "hash_layers": 1, **EXPERTS},
    "qwen3_next": {"period": 2, "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8, "expert_mlp": 24}
    | {"layers": 2, "initializer_std": 0.1, "shared_mlp": 20, "mtp_layers": 1, **EXPERTS},
    "smollm3": {"nope_interval": 2},
    "olmo3": {"period": 2, "window": 6},
    "arcee": {},
    "ernie4_5": {"bias": True},
    "glm4": {},
    "cwm": {"period": 2, "window": 6},
    "exaone4": {"period": 2, "window": 6},
    "phi3": {"window": 6, "rotary_share": 0.5},
    "granite": {"embedding_scale": 3.0, "attention_scale": 0.3, "residual_scale": 0.4, "logit_divisor": 2.0},
    "seed_oss": {"output_bias": True},
    "ministral3": {
        "window": 9,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
        "temperature_rate": 0.3,
    },
    "pixtral": {"vision": PixtralTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3)},
    "mistral3": {"window": 9, "vision": PixtralTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3)},
    "qwen3_5": {
        "period": 3,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 8,
        "initializer_std": 0.1,
        "mtp_layers": 1,
    },
    "qwen2_moe": {"dense_layers": (0,), "expert_mlp": 24, "shared_mlp": 20, **EXPERTS},
    "glm4_moe": {"expert_mlp": 24, "mtp_layers": 1, "head_norms": True, **EXPERTS},
    "deepseek_v2": {
        "kv_heads": None,
        "kv_rank": 12,
        "nope_dim": 8,
        "rope_dim": 4,
        "value_dim": 8,
        "expert_mlp": 24,
        **EXPERTS,
    },
    "granite_moe": {
        "embedding_scale": 3.0,
        "attention_scale": 0.3,
        "residual_scale": 0.4,
        "logit_divisor": 2.0,
        **EXPERTS,
    },
    "bamba": {
        "attention_layers": (1,),
        "mamba_heads": 4,
        "mamba_head_dim": 8,
        "mamba_groups": 2,
        "mamba_state": 8,
    },
    "granite_moe_hybrid": {
        "attention_layers": (1,),
        "mamba_heads": 4,
        "mamba_head_dim": 8,
        "mamba_state": 8,
        "shared_mlp": 20,
        "attention_scale": 0.3,
        "residual_scale": 0.4,
        **EXPERTS,
    },
    "nemotron_h": {
        "layers": 6,
        "pattern": "ME*--M",
        "mamba_heads": 4,
        "mamba_head_dim": 8,
        "mamba_groups": 2,
        "mamba_state": 8,
        "expert_mlp": 24,
        "shared_mlp": 20,
        **EXPERTS,
    },
    "minimax": {"attention_layers": (1,), "rotary_dim": 4, "lightning_alpha": 2.0, **EXPERTS},
    "minimax_m2": {"rotary_dim": 4, **EXPERTS},
    "qwen3_5_moe": {
        "period": 3,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 8,
        "initializer_std": 0.1,
        "shared_mlp": 20,
        "mtp_layers": 1,
        **EXPERTS,
    },
}
# Together these have windows, experts, sinks, soft caps, latents, recurrent states, shared keys and quantized weights.
DEFAULT = {"gemma4": "float", "gpt_oss": "w8a8", "deepseek_v32": "float", "qwen3_next": "float"}
CASES = [
    pytest.param(family, rules, marks=[] if DEFAULT.get(family) == rules else pytest.mark.slow)
    for family in FAMILIES
    for rules in ("float", "w8a8")
    # Over latents the engine multiplies queries by the matrix that the whole-sequence model multiplies latents by: with
    # activations of eight bits the two code different arrays, and have no common answer. In deepseek_v4, a code that is
    # another by one selects other entries.
    if rules != "w8a8" or family not in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa")
]
# Pages of latents, and pages that layers share, are used again. A recurrent state describes the last token of another
# prompt: all is computed again.
REUSED_TOKENS = {"deepseek_v3": 20, "deepseek_v32": 20, "gemma4": 20, "qwen3_next": 0, "minimax": 0}
W8A8 = [{"path": ".*", "weights": "int8", "activations": "int8"}]
TOLERANCE = {"float": 0.0, "w8a8": 0.1}  # codes of activations: sums in another order take one to its neighbour
PAIR = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=4, pages=16)  # too few for two long sequences


def model_of(family, sizes):
    entry = registries.models[family]
    known = {field.name for field in dataclasses.fields(entry.config_class)}
    config = entry.config_class(**{name: value for name, value in {**SIZES, **sizes}.items() if name in known})
    return jax.jit(lambda: entry.build(config, key=jax.random.key(0)))()


def test_every_family_that_is_said_to_be_served_is_here():
    named = {name for name in registries.models.names() if "pages" in getattr(registries.models[name], "tested", ())}
    assert named == set(FAMILIES)


def opened(model):
    nowhere = Path("nowhere")
    return generative_checkpoint(model, model.config, name="tiny", tokenizer=nowhere, origin=nowhere)


@functools.cache
def checkpoint_of(family, rules):
    model = model_of(family, FAMILIES[family])
    if rules == "w8a8":
        sample = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}
        model = quantize_model(model, W8A8, sample)
    return opened(model)


@functools.cache
def reference_of(family, rules):
    return Reference(checkpoint_of(family, rules))


@pytest.fixture(scope="module")
def engine_of():
    """`engine_of(family, rules)` runs until another is asked for."""
    running = contextlib.ExitStack()

    @functools.lru_cache(maxsize=1)
    def make(family, rules):
        running.close()
        return running.enter_context(LLMEngine(checkpoint_of(family, rules), PAIR))

    with running:
        yield make


@pytest.mark.parametrize(("family", "rules"), CASES)
def test_the_engine_answers_as_the_model_does(engine_of, family, rules):
    """Those of latents and of recurrent states then answer a prompt that begins alike."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, SIZES["vocab_size"], length).tolist() for length in (3, 30)]
    engine, reference = engine_of(family, rules), reference_of(family, rules)
    found = complete(engine, prompts, greedy(10))
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        assert len(continuation.tokens) == 10
        reference.assert_most_likely(prompt, continuation.tokens, tolerance=TOLERANCE[rules])
    if family in REUSED_TOKENS:
        branch = [*prompts[1][:22], 5, 6]
        ((continuation,),) = complete(engine, [branch], greedy(6))
        assert engine.stats().prefix_hits_tokens == REUSED_TOKENS[family]
        reference.assert_most_likely(branch, continuation.tokens, tolerance=TOLERANCE[rules])


RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "bamba", "granite_moe_hybrid", "nemotron_h")
RECURRENT += ("minimax", "deepseek_v4")
DRAFTED = [family for family in FAMILIES if family not in RECURRENT]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "mistral" else pytest.mark.slow) for name in DRAFTED]
)
def test_drafts_change_no_answer(family, monkeypatch):
    """Drafts cross the windows, and rejected ones leave keys or latents that later tokens replace."""
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)  # drafts always pay,
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)  # from the first step on
    # After a token of the second prompt, the next one there is drafted, which is seldom the right one.
    prompts = [[7, 8, 9] * 4, np.random.default_rng(2).permutation(SIZES["vocab_size"])[:40].tolist()]
    reference = reference_of(family, "float")
    config = dataclasses.replace(PAIR, pages=24, speculation=SpeculationConfig(tokens=4, min_match=1))
    with LLMEngine(checkpoint_of(family, "float"), config) as engine:
        found = complete(engine, prompts, greedy(20))
        stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        assert len(continuation.tokens) == 20
        reference.assert_most_likely(prompt, continuation.tokens)


def test_layers_without_a_state_keep_no_model_from_its_prefix_cache_and_speculation():
    """Attention and feed-forward layers of a family that may also have recurrent ones."""
    model = opened(model_of("nemotron_h", {**FAMILIES["nemotron_h"], "layers": 2, "pattern": "*-"}))
    reference, prompt = Reference(model), np.random.default_rng(0).integers(0, SIZES["vocab_size"], 20).tolist()
    config = dataclasses.replace(PAIR, prefix_caching=True, speculation=SpeculationConfig(tokens=4, min_match=1))
    with LLMEngine(model, config) as engine:
        complete(engine, [prompt], greedy(4))
        ((continuation,),) = complete(engine, [[*prompt[:14], 5, 6]], greedy(6))
        assert engine.stats().prefix_hits_tokens == 12
    reference.assert_most_likely([*prompt[:14], 5, 6], continuation.tokens)


def test_a_preempted_sequence_begins_its_recurrent_state_anew(engine_of):
    """Two sequences need more pages than there are: the later one loses its own, and computes all tokens again."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, SIZES["vocab_size"], 20).tolist() for _ in range(3)]
    engine, reference = engine_of("qwen3_next", "float"), reference_of("qwen3_next", "float")  # those of its case above
    found = complete(engine, prompts, greedy(24), in_one_turn=True)
    assert engine.stats().preemptions > 0
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        assert len(continuation.tokens) == 24
        reference.assert_most_likely(prompt, continuation.tokens)


def test_prefixes_of_a_recurrent_model_are_not_kept_on_demand_either():
    with pytest.raises(ConfigError, match=r"prefix_caching=True.*recurrent"):
        LLMEngine(checkpoint_of("qwen3_next", "float"), dataclasses.replace(PAIR, prefix_caching=True))
