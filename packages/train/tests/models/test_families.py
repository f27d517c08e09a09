"""Every family decodes as it runs whole, goes through a checkpoint and back, and refuses what it cannot do."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, ConversionError, TrainingError
from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig
from stack_core.abi.plugins import registries
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.models.weight_map import joined_tensors, shared_tensors, stored_rules
from stack_train.nn import boundary
from stack_train.nn.delta import DeltaAttention
from stack_train.nn.lightning import LightningAttention
from stack_train.nn.mamba import Mamba2
from stack_train.variables.weights import abstract_params

from ..random_models import draw_model

SIZES = {"vocab_size": 61, "embed": 24, "heads": 4, "kv_heads": 2, "mlp": 40, "max_positions": 32, "dtype": "float32"}
MAMBA = {
    "layers": 3,
    "attention_layers": (1,),
    "mamba_heads": 6,
    "mamba_head_dim": 8,
    "mamba_groups": 2,
    "mamba_state": 5,
    "mamba_kernel": 3,
}
FAMILIES = {
    "llama": {"layers": 2, "attention_bias": True},
    "mistral": {"layers": 2, "window": 5},
    "qwen2": {"layers": 3, "window": 5, "full_layers": 1},
    "mixtral": {"layers": 2, "experts": 5, "active_experts": 2},
    "qwen3_moe": {"layers": 4, "dense_layers": (0,), "experts": 6, "active_experts": 3, "expert_mlp": 16},
    "qwen3": {"layers": 2, "head_dim": 8},
    "gemma3": {"layers": 5, "head_dim": 8, "period": 2, "window": 5, "query_scalar": 9, "logit_softcap": 3.0},
    "gemma3_vision": {
        "layers": 3,
        "head_dim": 8,
        "period": 2,
        "window": 5,
        "query_scalar": 9,
        "image_token": 60,
        "image_begin": 58,
        "image_end": 59,
        "image_tokens": 4,
        "vision": {"embed": 14, "heads": 2, "mlp": 18, "layers": 2, "image_size": 23, "patch": 4},
    },
    "qwen2_5_vl": {
        "layers": 3,
        "rope_sections": (1, 1, 1),
        "image_token": 60,
        "vision": {"embed": 16, "heads": 2, "mlp": 18, "layers": 3, "patch": 3, "window": 12, "full_layers": (1,)},
    },
    "qwen3_vl": {
        "layers": 3,
        "head_dim": 8,
        "rope_sections": (2, 1, 1),
        "image_token": 60,
        "vision": {"embed": 16, "heads": 2, "mlp": 18, "layers": 3, "patch": 3, "position_side": 3, "deepstack": (0,)},
    },
    "qwen3_vl_moe": {
        "layers": 3,
        "head_dim": 8,
        "rope_sections": (2, 1, 1),
        "experts": 6,
        "active_experts": 3,
        "expert_mlp": 16,
        "image_token": 60,
        "vision": {
            "embed": 16,
            "heads": 2,
            "mlp": 18,
            "layers": 2,
            "patch": 3,
            "position_side": 3,
            "deepstack": (0, 1),
        },
    },
    "gemma4": {
        "layers": 7,
        "head_dim": 10,
        "global_layers": (1, 3, 6),
        "window": 5,
        "global_head_dim": 16,
        "global_kv_heads": 1,
        "keys_as_values": True,
        "shared_layers": 3,
        "wide_shared_mlp": True,
        "per_layer_input": 6,
        "logit_softcap": 3.0,
    },
    "gemma4_vision": {
        "layers": 4,
        "head_dim": 8,
        "global_layers": (1, 3),
        "window": 5,
        "global_head_dim": 12,
        "shared_layers": 2,
        "per_layer_input": 6,
        "image_token": 60,
        "vision": {
            "embed": 14,
            "heads": 2,
            "head_dim": 8,
            "mlp": 18,
            "layers": 2,
            "patch": 3,
            "positions": 9,
            "clipped": True,
            "standardize": True,
        },
    },
    "gemma2": {"layers": 3, "head_dim": 8, "window": 5, "query_scalar": 9},
    "olmo2": {"layers": 2},
    "gpt_oss": {"layers": 2, "head_dim": 8, "window": 5, "experts": 4, "active_experts": 2},
    "deepseek_v3": {
        "kv_heads": None,
        "layers": 3,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "experts": 6,
        "active_experts": 2,
        "expert_mlp": 16,
        "expert_groups": 3,
        "kept_groups": 2,
        "mtp_layers": 2,
    },
    "deepseek_v32": {
        "kv_heads": None,
        "layers": 3,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "index_heads": 3,
        "index_dim": 7,
        "index_count": 4,
        "experts": 6,
        "active_experts": 2,
        "expert_mlp": 16,
        "mtp_layers": 2,
    },
    "deepseek_v4": {
        "kv_heads": None,
        "layers": 4,
        "head_dim": 10,
        "query_rank": 10,
        "rope_dim": 6,
        "output_groups": 2,
        "output_rank": 7,
        "window": 4,
        "kinds": ("window", "sparse", "heavy", "sparse"),
        "sparse_rate": 2,
        "heavy_rate": 3,
        "index_heads": 3,
        "index_dim": 8,
        "index_count": 2,
        "streams": 3,
        "stream_iterations": 3,
        "hash_layers": 1,
        "experts": 5,
        "active_experts": 2,
    },
    "glm_moe_dsa": {
        "kv_heads": None,
        "layers": 2,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "index_heads": 3,
        "index_dim": 7,
        "index_count": 4,
        "experts": 6,
        "active_experts": 2,
        "expert_mlp": 16,
    },
    "qwen3_next": {
        "layers": 3,
        "period": 2,
        "head_dim": 8,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "experts": 4,
        "active_experts": 2,
        "expert_mlp": 16,
        "shared_mlp": 12,
        "mtp_layers": 1,
    },
    "smollm3": {"layers": 4, "nope_interval": 2, "attention_bias": True},
    "olmo3": {"layers": 3, "period": 2, "window": 5, "attention_bias": True},
    "arcee": {"layers": 2, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"layers": 2, "bias": True},
    "glm4": {"layers": 2, "rotary_share": 0.67},
    "cwm": {"layers": 3, "period": 2, "window": 5, "mlp_bias": True},
    "exaone4": {"layers": 3, "period": 2, "window": 5},
    "phi3": {"layers": 2, "window": 5, "rotary_share": 0.67},
    "granite": {
        "layers": 2,
        "embedding_scale": 3.0,
        "attention_scale": 0.3,
        "residual_scale": 0.4,
        "logit_divisor": 2.0,
    },
    "seed_oss": {"layers": 2, "head_dim": 8, "output_bias": True},
    "ministral3": {
        "layers": 2,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
        "temperature_rate": 0.3,
    },
    "pixtral": {
        "layers": 2,
        "head_dim": 8,
        "image_token": 60,
        "vision": {"embed": 16, "heads": 2, "mlp": 18, "layers": 2, "patch": 3},
    },
    "mistral3": {
        "layers": 2,
        "head_dim": 8,
        "image_token": 60,
        "vision": {"embed": 16, "heads": 2, "mlp": 18, "layers": 2, "patch": 3},
    },
    "qwen3_5": {
        "layers": 3,
        "period": 2,
        "head_dim": 8,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "mtp_layers": 1,
    },
    "qwen2_moe": {
        "layers": 3,
        "dense_layers": (0,),
        "experts": 6,
        "active_experts": 3,
        "expert_mlp": 16,
        "shared_mlp": 12,
    },
    "glm4_moe": {
        "layers": 3,
        "head_dim": 8,
        "experts": 6,
        "active_experts": 2,
        "expert_mlp": 16,
        "expert_groups": 3,
        "kept_groups": 2,
        "mtp_layers": 1,
    },
    "deepseek_v2": {
        "kv_heads": None,
        "layers": 3,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "experts": 6,
        "active_experts": 2,
        "expert_mlp": 16,
        "expert_groups": 6,
        "kept_groups": 3,
    },
    "granite_moe": {
        "layers": 2,
        "experts": 5,
        "active_experts": 2,
        "embedding_scale": 3.0,
        "attention_scale": 0.3,
        "residual_scale": 0.4,
    },
    "bamba": {**MAMBA, "head_dim": 8},
    "granite_moe_hybrid": {
        **MAMBA,
        "experts": 5,
        "active_experts": 2,
        "shared_mlp": 12,
        "embedding_scale": 3.0,
        "attention_scale": 0.3,
        "residual_scale": 0.4,
        "rotary": True,
    },
    "nemotron_h": {
        **{key: size for key, size in MAMBA.items() if key != "attention_layers"},
        "layers": 5,
        "pattern": "ME*--",
        "head_dim": 8,
        "experts": 5,
        "active_experts": 2,
        "expert_mlp": 16,
        "shared_mlp": 12,
    },
    "minimax": {
        "layers": 3,
        "attention_layers": (1,),
        "rotary_dim": 4,
        "experts": 5,
        "active_experts": 2,
        "attention_alpha": 1.7,
        "lightning_alpha": 2.3,
        "mlp_alpha": 3.1,
        "lightning_beta": 0.8,
    },
    "minimax_m2": {"layers": 2, "head_dim": 8, "rotary_dim": 4, "experts": 5, "active_experts": 2},
    "qwen3_5_moe": {
        "layers": 3,
        "period": 2,
        "head_dim": 8,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "experts": 4,
        "active_experts": 2,
        "shared_mlp": 12,
        "mtp_layers": 1,
    },
    "llama4": {
        "layers": 3,
        "head_dim": 8,
        "nope_interval": 2,
        "sparse_step": 2,
        "chunk": 5,
        "temperature_tokens": 3,
        "experts": 4,
        "active_experts": 2,
        "expert_mlp": 16,
    },
}
STATES = {
    "gemma4": {},
    "gpt_oss": {},
    "deepseek_v3": {"layers": 1, "dense_layers": 1, "mtp_layers": 0},
    "deepseek_v32": {"layers": 1, "dense_layers": 1, "mtp_layers": 0},
    "deepseek_v4": {"layers": 2, "kinds": ("sparse", "heavy")},
    "qwen3_next": {"layers": 2, "dense_layers": (0, 1), "mtp_layers": 0},
    "ministral3": {},
    "nemotron_h": {"layers": 3, "pattern": "M*-"},
    "minimax": {},
}
"""Families with every kind of state, sinks, temperatures, shared keys and residual streams, made small by changes."""
WHOLE = ("gemma3", "deepseek_v3", "qwen3_next", "granite_moe_hybrid", "nemotron_h")
"""Families with experts and more layers beside these states, and with scaled residual sums."""
SEQ = 12
ONE_DEVICE = make_mesh(MeshConfig(), jax.devices()[:1])


def make_config(name, **changes):
    return registries.models[name].config_class(**{**SIZES, "initializer_std": 0.2, **FAMILIES[name], **changes})


@functools.cache
def make_model(name, **changes):
    """To read only."""
    config = make_config(name, **changes)
    return draw_model(lambda: registries.models[name].build(config, key=jax.random.key(0)), norm=0.0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [*STATES.items(), *(pytest.param(name, {}, marks=pytest.mark.slow) for name in WHOLE)],
    ids=[*STATES, *(f"{name} whole" for name in WHOLE)],
)
def test_a_document_gives_the_same_packed_behind_another_and_in_pieces_through_the_cache(name, changes):
    """Two packed rows, one document and two, against the first and the last of these in pieces."""
    model, first = make_model(name, **changes), 5
    tokens = jax.random.randint(jax.random.key(1), (2, SEQ), 0, SIZES["vocab_size"])
    positions = jnp.array([[*range(SEQ)], [*range(first), *range(SEQ - first)]])
    segments = jnp.array([[1] * SEQ, [1] * first + [2] * (SEQ - first)])

    @jax.jit
    def run(model, *arguments, cache=None):
        outputs = model(*arguments, cache=cache)
        return outputs.hidden, outputs.cache

    packed, _ = run(model, tokens, positions, segments)

    tokens = jnp.stack([tokens[0], jnp.roll(tokens[1], -first)])
    cache, hidden, start = DenseKVCache.empty(model.states, batch=2, capacity=16), [], 0
    for seq in (5, 1, 1, 5):
        piece = slice(start, start + seq)
        found, cache = run(model, tokens[:, piece], jnp.tile(jnp.arange(SEQ)[piece], (2, 1)), cache=cache)
        hidden.append(found)
        start += seq
    pieces = jnp.concatenate(hidden, axis=1)
    np.testing.assert_allclose(pieces[0], packed[0], atol=2e-5)
    np.testing.assert_allclose(pieces[1, : SEQ - first], packed[1, first:], atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_attention_gets_its_keys_as_the_config_chooses(name):
    family = registries.models[name]
    kinds, changed = (
        {type(layer.attention): layer.attention for layer in family.spec(config).layers if layer.attention is not None}
        for config in (make_config(name), make_config(name, context_keys="gathered"))
    )
    acts = {kind: changed[kind] != attention for kind, attention in kinds.items()}
    recurrent = (DeltaAttention, LightningAttention, Mamba2)  # which refuse a sequence that devices share
    assert acts == {kind: kind not in recurrent for kind in kinds}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_become_tensors_and_come_back(name):
    """Every parameter has a rule, no two groups of rules share a tensor, and what is written can be read."""
    config = make_config(name)
    family = registries.models[name]
    random = np.random.default_rng(0)
    leaves = {
        path: random.normal(size=leaf.shape).astype(leaf.dtype)
        for path, leaf in named_leaves(abstract_params(config)).items()
    }
    rules = family.weight_rules(config)
    assert sorted(rule.parameter for rule in rules) == sorted(leaves)
    tensors = {}
    for group in shared_tensors(rules):
        joined = joined_tensors(group, [leaves[rule.parameter] for rule in group])
        for rule in group:
            shapes = rule.tensor_shapes(leaves[rule.parameter].shape)
            assert {tensor: array.shape for tensor, array in joined.items()} == shapes
        assert not tensors.keys() & joined.keys()
        tensors |= joined
    for rule in rules:
        assert rule.stored_in(tensors, leaves[rule.parameter].shape) is rule
        read = np.empty_like(leaves[rule.parameter])
        for tensor, part in rule.tensors(read).items():
            part[...] = rule.part_of(tensors[tensor])
        np.testing.assert_array_equal(read, leaves[rule.parameter])


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("expert_mlp", [24, 12, 16])
def test_square_tensors_of_experts_have_the_layout_of_the_others(expert_mlp, transposes):
    """With 24, the output matrices of the experts are square; with 12, the input matrices."""
    config = make_config("qwen3_vl_moe", expert_mlp=expert_mlp)
    rules, random = registries.models["qwen3_vl_moe"].weight_rules(config), np.random.default_rng(0)
    leaves = {
        path: random.normal(size=leaf.shape).astype(leaf.dtype)
        for path, leaf in named_leaves(abstract_params(config)).items()
    }
    tensors = {}
    for group in shared_tensors(rules):
        tensors |= joined_tensors(group, [leaves[rule.parameter] for rule in group])
    names = [name for name in tensors if ".experts." in name]
    sides = {tensors[name].shape[1:] for name in names}
    assert sides == {24: {(24, 48), (24, 24)}, 12: {(24, 24), (12, 24)}, 16: {(24, 32), (16, 24)}}[expert_mlp]
    if transposes:  # the layout of new models of transformers 5
        tensors |= {name: tensors[name].swapaxes(1, 2) for name in names}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    for rule in stored_rules(rules, tensors, shapes):
        read = np.empty_like(leaves[rule.parameter])
        for tensor, part in rule.tensors(read).items():
            part[...] = rule.part_of(tensors[tensor])
        np.testing.assert_array_equal(read, leaves[rule.parameter], err_msg=rule.parameter)
    if expert_mlp == 24:
        square = [rule for rule in rules if rule.parameter.endswith("expert_down")]
        with pytest.raises(ConversionError, match="square tensors, which may be transposed"):
            stored_rules(square, tensors, shapes)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5"])
def test_a_checkpoint_may_lack_the_layers_that_predict_later_tokens(name):
    family, config = registries.models[name], make_config(name)
    tensors = [each for rule in family.weight_rules(config) for each in rule.tensor_shapes((1, 1, 1, 1))]
    assert family.fitting(config, tensors) is config
    without = dataclasses.replace(config, mtp_layers=0)
    tensors = [each for rule in family.weight_rules(without) for each in rule.tensor_shapes((1, 1, 1, 1))]
    assert family.fitting(config, tensors) == family.fitting(without, tensors) == without


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_config_json_and_yaml(name):
    config = make_config(name, initializer_std=0.02)
    written = json.loads(json.dumps(registries.models[name].config_map.write(config)))
    fields = registries.models[name].config_map.read(written)
    read = parse(type(config), {**fields, "dtype": "float32", "param_dtype": "float32"})
    read = dataclasses.replace(read, head_dim=config.head_dim)  # resolved where it was None
    assert read == config
    assert parse(type(config), to_mapping(config)) == config


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_nobody_reads_are_refused_by_name(name):
    family = registries.models[name]
    written = family.config_map.write(make_config(name))
    with pytest.raises(ConversionError, match=r"frobnicate=3.*twist='left'"):
        family.config_map.read({**written, "frobnicate": 3, "twist": "left", "off": False, "none": None})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_axes_that_the_default_rules_know(name):
    config = make_config(name)
    model = nnx.eval_shape(lambda: registries.models[name].build(config, key=jax.random.key(0)))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        axes = leaf.get_metadata("logical_axes")
        inner = path[1:] if path[0] == "vision" else path
        assert (axes[0] == "layers") == (inner[0] in ("blocks", "further")), path
        DEFAULT_RULES.sharding(ONE_DEVICE, axes, leaf.shape)


def test_transformers_5_nests_what_transformers_4_does_not():
    """The same Gemma 3 in both spellings."""
    shared = {"num_hidden_layers": 7, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64}
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    four = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    five = {
        "layer_types": kinds,
        "_sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
    }
    read = registries.models["gemma3"].config_map.read
    assert read({**shared, **four}) == read({**shared, **five})
    with pytest.raises(ConversionError, match=r"layer_types="):
        read({**shared, **five, "layer_types": kinds[::-1]})


def test_layers_that_share_keys_have_no_state_and_their_own_loops():
    spec = registries.models["gemma4"].spec(make_config("gemma4"))
    assert [(group.start, len(group.period), group.repeats) for group in spec.groups] == [
        (0, 2, 2),
        (4, 1, 2),
        (6, 1, 1),
    ]
    assert [layer.attention.source for layer in spec.layers] == [None] * 4 + [2, 2, 3]
    states = make_model("gemma4").states
    assert [[state and (state.repeats, state.key_dim) for state in group] for group in states] == [
        [(2, 10), (2, 16)],
        [None],
        [None],
    ]


def test_layers_without_attention_have_no_state():
    states = make_model("nemotron_h").states
    kinds = [type(state).__name__ for group in states for state in group]
    assert kinds == ["Recurrent", "NoneType", "KeysValues", "NoneType"]


def test_stages_refuse_layers_that_share_keys_or_have_inputs_or_an_index():
    tokens = jnp.zeros((2, SEQ), jnp.int32)
    unshared = {"shared_layers": 0, "wide_shared_mlp": False}
    call = lambda model, tokens: boundary.in_stage(boundary.Received(None, None, 0, 2), model, tokens, tokens)
    for name, changes, cause in (
        ("gemma4", {}, "share keys and values"),
        ("gemma4", unshared, "per-layer embeddings"),
        ("minimax", {}, "decay by their depth"),
        ("deepseek_v32", {"index_training": "sparse"}, "train an indexer"),
    ):
        config = make_config(name, **changes)
        model = nnx.eval_shape(lambda n=name, c=config: registries.models[n].build(c, key=jax.random.key(0)))
        with pytest.raises(TrainingError, match=rf"{cause}.*mesh\.stage=1"):
            jax.eval_shape(call, model, tokens)


GEMMA4 = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block=True without num_experts and top_k_experts and moe_inter"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input=7, not the vocab_size 262144"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types="),
        ({"layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}}, r"rope_parameters\.sliding"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, r"per_layer_config=.*\[1, 3\]"),
        ({"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}}, "per_layer_config="),
        ({"per_layer_config": {"1": {"sliding_window": 8}, "3": {"sliding_window": 8}}}, "per_layer_config="),
    ],
)
def test_a_gemma4_that_is_not_supported_is_refused_by_name(changes, message):
    read = registries.models["gemma4"].config_map.read
    assert read(GEMMA4)["global_layers"] == (1, 3)
    with pytest.raises(ConversionError, match=message):
        read({**GEMMA4, **changes})


def test_heads_of_global_layers_are_read_from_either_key():
    """Published files have a key for each size, and transformers saves overrides of each layer."""
    read = registries.models["gemma4"].config_map.read
    sizes = {"head_dim": 32, "num_key_value_heads": 2}
    saved = read({**GEMMA4, "per_layer_config": {"1": sizes, "3": sizes}})
    published = {"global_head_dim": 32, "num_global_key_value_heads": 2}
    assert saved == read({**GEMMA4, **published, "attention_k_eq_v": True}) | {"keys_as_values": False}
    assert read({**GEMMA4, **published})["global_kv_heads"] is None  # which transformers ignores then


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_layers": (1, 7)}, r"global_layers names \[7\], and the model has layers=7"),
        ({"global_layers": (1, 3)}, "lacks the last layer, 6"),
        ({"global_head_dim": 7}, "global_head_dim=7 is odd"),
        ({"global_kv_heads": 3}, "not a multiple of global_kv_heads=3"),
        ({"shared_layers": 6}, "leaves no full_attention layer"),
        ({"shared_layers": 7}, "leaves no full_attention or sliding_attention layer"),
        ({"shared_layers": 0}, "wide_shared_mlp has no layers"),
        ({"experts": 4}, "active_experts=8 is more than experts=4"),
        ({"expert_mlp": 4}, "expert_mlp would have no effect without experts"),
    ],
)
def test_sizes_that_gemma4_cannot_have_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config("gemma4", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_groups": 4}, "expert_groups=4 has to divide experts=6"),
        ({"expert_groups": 6, "kept_groups": 2}, "hold 1 each"),
        ({"kept_groups": 1, "active_experts": 3}, "must hold at least active_experts=3"),
    ],
)
def test_groups_of_experts_that_hold_too_few_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config("deepseek_v3", **changes)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=None, and the indexer reads the query latent"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types=.*not 'indexed_attention'"),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types=.*not dense layers foll"),
        ("deepseek_v32", {"indexer_types": ["full", "shared"]}, "indexer_types="),
        ("deepseek_v32", {"attention_bias": True}, "attention_bias=True, not False"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "share the selection of an earlier layer"),
        ("glm_moe_dsa", {"index_topk_pattern": "FS"}, "share the selection of an earlier layer"),
        ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 2}, "index_topk_freq=4, not 1"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False, not True"),
    ],
)
def test_a_model_with_an_indexer_that_is_not_supported_is_refused_by_name(name, keys, message):
    config_map = registries.models[name].config_map
    with pytest.raises(ConversionError, match=message):
        config_map.read({**config_map.write(make_config(name)), **keys})


def test_layers_of_transformers_with_an_indexer_follow_their_kinds():
    config_map = registries.models["deepseek_v32"].config_map
    written = config_map.write(make_config("deepseek_v32"))
    kinds = {"layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense", "dense", "sparse"]}
    assert config_map.read(written)["dense_layers"] == 1
    assert config_map.read({**written, **kinds})["dense_layers"] == 2
    config_map = registries.models["glm_moe_dsa"].config_map
    written = config_map.write(make_config("glm_moe_dsa"))
    assert config_map.read({**written, "indexer_types": ["full"] * 2, "index_topk_freq": 4}) == config_map.read(written)


def test_an_indexer_has_the_rotary_features_and_the_query_latent_of_its_attention():
    with pytest.raises(ConfigError, match="index_dim=3 is less than rope_dim=4"):
        make_config("deepseek_v32", index_dim=3)
    attention = registries.models["deepseek_v32"].spec(make_config("deepseek_v32")).layers[0].attention
    with pytest.raises(ConfigError, match=r"has an indexer.*Set query_rank"):
        dataclasses.replace(attention, query_rank=None)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_training_does_not_change_an_indexer(name):
    model = nnx.eval_shape(lambda: registries.models[name].build(make_config(name), key=jax.random.key(0)))
    trained = {path: leaf.get_metadata().get("trained", True) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert {path for path in trained if "indexer" in path} == {
        path for path, may_train in trained.items() if not may_train and path[-1] != "selection_bias"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "MAE"}, r"pattern='MAE': expected a letter per layer: M \(Mamba-2\)"),
        ({"pattern": ""}, "pattern='': expected a letter"),
        ({"layers": 4}, r"pattern='ME\*--' has 5 layers, more than layers=4"),
        ({"rope_theta": 5.0}, r"rope_theta=5.0: Nemotron-H has no rotary positions"),
        ({"tie_embeddings": True}, "tie_embeddings=True: .* its own head"),
        ({"mamba_groups": 4}, "mamba_heads=6 is not a multiple of mamba_groups=4"),
    ],
)
def test_layers_that_a_nemotron_h_cannot_have_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config("nemotron_h", **changes)


def test_a_nemotron_h_repeats_its_pattern_and_reads_both_spellings_of_it():
    config_map = registries.models["nemotron_h"].config_map
    assert make_config("nemotron_h", layers=7).kinds == "ME*--ME"
    written = config_map.write(make_config("nemotron_h", layers=7))
    assert written["hybrid_override_pattern"] == "ME*--ME"
    blocks = ["mamba", "moe", "attention", "mlp", "mlp", "linear_attention", "moe"]
    five = {key: value for key, value in written.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    assert config_map.read({**five, "layers_block_type": blocks}) == config_map.read(written)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX', not of M"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type with conv, not of linear_attention"),
        ({"num_hidden_layers": 9}, "num_hidden_layers=9, not the 5"),
        ({"moe_latent_size": 8}, "moe_latent_size=8, not None"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1, not 0"),
        ({"n_group": 2, "mlp_hidden_act": "silu"}, "mlp_hidden_act='silu', not 'relu2'; n_group=2, not 1"),
        ({"time_step_limit": [0.0, 0.5]}, r"time_step_limit=\[0.0, 0.5\], not"),
    ],
)
def test_keys_of_a_nemotron_h_that_the_model_does_not_support_are_refused_by_name(keys, message):
    config_map = registries.models["nemotron_h"].config_map
    with pytest.raises(ConversionError, match=message):
        config_map.read({**config_map.write(make_config("nemotron_h")), **keys})


def test_a_minimax_reads_its_kinds_of_layers_and_its_rotary_features_in_every_spelling():
    config_map = registries.models["minimax"].config_map
    config = make_config("minimax")
    written = config_map.write(config)
    assert written["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    found = config_map.read(written)
    assert (found["attention_layers"], found["rotary_dim"], found["lightning_beta"]) == ((1,), 4, 0.8)
    others = {key: value for key, value in written.items() if key not in ("rotary_dim", "layer_types", "rope_theta")}
    found = config_map.read({**others, "partial_rotary_factor": 0.7, "block_size": 64})
    # As in transformers: softmax attention first, and another base of the frequencies.
    assert (found["attention_layers"], found["rotary_dim"], found["rope_theta"]) == ((0, 2), 4, 1e6)
    with pytest.raises(ConfigError, match=r"attention_layers=\(3,\): expected indices below layers=3"):
        make_config("minimax", attention_layers=(3,))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, r"layer_types=.* not 3 of linear_attention and full_attention"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "layer_types=.*'mamba'"),
        ({"hidden_act": "gelu", "router_jitter_noise": 0.1}, "hidden_act='gelu', not 'silu'; router_jitter_noise=0.1"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    ],
)
def test_keys_of_a_minimax_that_the_model_does_not_support_are_refused_by_name(keys, message):
    config_map = registries.models["minimax"].config_map
    with pytest.raises(ConversionError, match=message):
        config_map.read({**config_map.write(make_config("minimax")), **keys})


@dataclasses.dataclass
class Tensor:
    array: np.ndarray

    def read(self):
        return self.array


def test_stored_decay_rates_of_a_minimax_may_be_rounded_but_not_others():
    family, config = registries.models["minimax"], make_config("minimax")
    name, rates = "model.layers.2.self_attn.slope_rate", config.lightning.rates
    rounded = jnp.asarray(rates[2], jnp.bfloat16)[:, None, None]
    assert family.fitting(config, {name: Tensor(np.asarray(rounded))}) == family.fitting(config, {}) == config
    with pytest.raises(ConversionError, match=r"layers\.2\.self_attn\.slope_rate has the decay rates .*heads=4"):
        family.fitting(config, {name: Tensor(rates[1][:, None, None])})
