"""Every choice acts: another value of a config's field gives another program, or is listed here with its reason."""

import dataclasses
import itertools
import re
import types
import typing

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.text.images import SeesImages
from stack_train.models.encoder import Encoder
from stack_train.models.encoder_decoder import EncoderDecoder

ELSEWHERE = {
    "name": "the registry is chosen by it",
    "max_positions": "data and engines check lengths against it",
    "context_keys": "acts on a mesh that splits sequences (test_families)",
    "expert_buffer": "acts on a mesh that splits experts",
    "cached_tokens": "sizes the states of a cache (test_deepseek_v4)",
    "start_token": "data and generation begin targets with it (test_pairs, test_source_texts)",
    "image_begin": "the reader of images writes it (test_gemma3_vision)",
    "image_end": "the reader of images writes it (test_gemma3_vision, test_pixtral)",
    "image_break": "the reader of images writes it (test_pixtral)",
    "longest_edge": "the reader of images scales by it (test_pixtral)",
    "resample": "the reader of images scales by it (parity's test_pixtral)",
    "max_image_tokens": "the reader of images scales by it (test_gemma4_vision)",
    "min_pixels": "the reader of images scales by it (test_grid_images)",
    "max_pixels": "the reader of images scales by it (test_grid_images)",
}
"""Fields whose effect is outside of a program on one device, and where it is."""

SIZES = {"vocab_size": 61, "embed": 24, "heads": 4, "kv_heads": 2, "mlp": 40, "max_positions": 32, "dtype": "float32"}
TOWER = {"embed": 16, "mlp": 24, "layers": 2, "heads": 2, "image_size": 28, "patch": 7}
PIXTRAL_TOWER = {"embed": 16, "mlp": 24, "layers": 2, "heads": 2, "patch": 3}
GRID_TOWER = {"embed": 16, "mlp": 24, "layers": 3, "heads": 2, "patch": 3, "position_side": 3, "deepstack": (0,)}
WINDOWED_TOWER = {"embed": 16, "mlp": 24, "layers": 2, "heads": 2, "patch": 3, "window": 12, "full_layers": (1,)}
GEMMA4_TOWER = {"embed": 16, "mlp": 24, "layers": 2, "heads": 2, "head_dim": 8, "patch": 3, "positions": 9}
EXPERTS = {"experts": 4, "active_experts": 2, "expert_mlp": 16}
MAMBA = {
    "layers": 4,
    "attention_layers": (1, 3),
    "mamba_heads": 6,
    "mamba_head_dim": 8,
    "mamba_groups": 2,
    "mamba_state": 5,
    "mamba_kernel": 3,
}
PIXTRAL = {
    "layers": 2,
    "head_dim": 8,
    "window": 5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    "temperature_rate": 0.3,
    "vision": PIXTRAL_TOWER,
    "image_token": 7,
}
INDEXED = {
    **EXPERTS,
    "kv_heads": None,
    "layers": 3,
    "query_rank": 10,
    "kv_rank": 7,
    "nope_dim": 6,
    "rope_dim": 4,
    "value_dim": 5,
    "index_heads": 3,
    "index_dim": 8,
    "index_count": 5,
    "expert_groups": 2,
    "kept_groups": 1,
    "mtp_layers": 1,
}
FAMILIES = {
    "llama": {"layers": 2},
    "mistral": {"layers": 2, "window": 5},
    "qwen2": {"layers": 3, "window": 5, "full_layers": 1},
    "mixtral": {"layers": 2, "experts": 4, "active_experts": 2},
    "qwen3_moe": {"layers": 3, "dense_layers": (0,), **EXPERTS},
    "qwen3": {"layers": 3, "head_dim": 8, "window": 5, "full_layers": 1},
    "gemma3": {"layers": 4, "head_dim": 8, "period": 2, "window": 5, "query_scalar": 9, "logit_softcap": 3.0},
    "gemma3_vision": {
        "layers": 4,
        "head_dim": 8,
        "period": 2,
        "window": 5,
        "query_scalar": 9,
        "logit_softcap": 3.0,
        "vision": TOWER,
        "image_tokens": 4,
        "image_token": 7,
    },
    "qwen2_5_vl": {"layers": 2, "embed": 32, "rope_sections": (2, 1, 1), "vision": WINDOWED_TOWER, "image_token": 7},
    "qwen3_vl": {"layers": 3, "head_dim": 8, "rope_sections": (2, 1, 1), "vision": GRID_TOWER, "image_token": 7},
    "qwen3_vl_moe": {
        **EXPERTS,
        "layers": 3,
        "head_dim": 8,
        "dual_chunk": {"chunk": 6, "local": 2},
        "rope_sections": (2, 1, 1),
        "dense_layers": (0,),
        "vision": GRID_TOWER,
        "image_token": 7,
    },
    "gemma4": {
        "layers": 6,
        "head_dim": 8,
        "global_layers": (1, 3, 5),
        "window": 5,
        "global_head_dim": 16,
        "shared_layers": 2,
        "per_layer_input": 6,
        "logit_softcap": 3.0,
        "experts": 4,
        "active_experts": 2,
        "expert_mlp": 16,
    },
    "gemma4_vision": {
        "layers": 6,
        "head_dim": 8,
        "global_layers": (1, 3, 5),
        "window": 5,
        "global_head_dim": 16,
        "shared_layers": 2,
        "per_layer_input": 6,
        "logit_softcap": 3.0,
        "experts": 4,
        "active_experts": 2,
        "expert_mlp": 16,
        "vision": GEMMA4_TOWER,
        "image_token": 7,
    },
    "pixtral": PIXTRAL,
    "mistral3": PIXTRAL,
    "gemma2": {"layers": 4, "head_dim": 8, "window": 5, "query_scalar": 9},
    "olmo2": {"layers": 2},
    "gpt_oss": {"layers": 4, "head_dim": 8, "window": 5, "experts": 4, "active_experts": 2},
    "deepseek_v3": {
        **EXPERTS,
        "kv_heads": None,
        "layers": 3,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "expert_groups": 2,
        "kept_groups": 1,
        "mtp_layers": 1,
    },
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        "kv_heads": None,
        "layers": 5,
        "head_dim": 10,
        "query_rank": 10,
        "rope_dim": 6,
        "output_groups": 2,
        "output_rank": 7,
        "window": 4,
        "kinds": ("window", *("sparse", "heavy") * 2),
        "sparse_rate": 2,
        "heavy_rate": 3,
        "index_heads": 3,
        "index_dim": 8,
        "index_count": 2,
        "streams": 3,
        "stream_iterations": 3,
        "hash_layers": 1,
        "experts": 4,
        "active_experts": 2,
    },
    "glm_moe_dsa": INDEXED,
    "qwen3_next": {
        **EXPERTS,
        "layers": 5,
        "period": 2,
        "dense_layers": (0,),
        "head_dim": 16,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "shared_mlp": 12,
        "mtp_layers": 1,
    },
    "smollm3": {"layers": 4, "nope_interval": 2, "attention_bias": True},
    "olmo3": {"layers": 4, "period": 2, "window": 5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "arcee": {"layers": 2, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"layers": 2, "bias": True},
    "glm4": {"layers": 2, "head_dim": 8},
    "cwm": {"layers": 4, "period": 2, "window": 5, "mlp_bias": True},
    "exaone4": {"layers": 4, "period": 2, "window": 5},
    "phi3": {"layers": 2, "window": 5, "head_dim": 8},
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
        "window": 5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
        "temperature_rate": 0.3,
    },
    "qwen3_5": {
        "layers": 5,
        "period": 2,
        "head_dim": 16,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "mtp_layers": 1,
    },
    "qwen2_moe": {"layers": 3, "dense_layers": (0,), "shared_mlp": 12, **EXPERTS},
    "glm4_moe": {
        "layers": 3,
        "head_dim": 16,
        "rotary_share": 0.25,
        "expert_groups": 2,
        "kept_groups": 1,
        "mtp_layers": 1,
        **EXPERTS,
    },
    "deepseek_v2": {
        "kv_heads": None,
        "layers": 3,
        "query_rank": 10,
        "kv_rank": 7,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "expert_groups": 2,
        "kept_groups": 1,
        **EXPERTS,
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
    "nemotron_h": {**MAMBA, "pattern": "ME*-", "head_dim": 8, "shared_mlp": 12, **EXPERTS},
    "minimax": {"layers": 4, "attention_layers": (1, 3), "head_dim": 8, "rotary_dim": 4, **EXPERTS},
    "minimax_m2": {"layers": 2, "head_dim": 8, "rotary_dim": 4, "experts": 4, "active_experts": 2},
    "qwen3_5_moe": {
        "layers": 5,
        "period": 2,
        "head_dim": 16,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 5,
        "shared_mlp": 12,
        "experts": 4,
        "active_experts": 2,
        "mtp_layers": 1,
    },
    "llama4": {
        "layers": 4,
        "head_dim": 8,
        "nope_interval": 2,
        "sparse_step": 2,
        "chunk": 5,
        "temperature_tokens": 3,
        **EXPERTS,
    },
    "bert": {"layers": 2},
    "roberta": {"layers": 2},
    "xlm_roberta": {"layers": 2},
    "modernbert": {"layers": 4, "window": 4},
    **{name: {"layers": 2, "head_dim": 6, "buckets": 6, "max_distance": 9} for name in ("t5", "mt5", "umt5")},
}
VALUES = {
    "heads": 2,
    "vision": {
        "gemma3_vision": {**TOWER, "mlp": 32},
        "gemma4_vision": {**GEMMA4_TOWER, "mlp": 32},
        "qwen2_5_vl": {**WINDOWED_TOWER, "mlp": 32},
        **{name: {**GRID_TOWER, "mlp": 32} for name in ("qwen3_vl", "qwen3_vl_moe")},
        **{name: {**PIXTRAL_TOWER, "mlp": 32} for name in ("pixtral", "mistral3")},
    },
    "rope_sections": (1, 2, 1),
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "dense_layers": {"glm4_moe": 0, "deepseek_v2": 0, "deepseek_v3": 0, "deepseek_v32": 0, "glm_moe_dsa": 0}
    | dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"), (1,)),
    "sparse_step": {"llama4": 4, **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"), 2)},
    "rotary_share": 0.5,
    "attention_layers": (0,),
    "global_layers": (2, 5),
    "global_kv_heads": 1,
    "shared_layers": 1,
    "pattern": "M*E-",
    "kinds": ("heavy", "sparse", "window", "sparse", "heavy"),
    "active_experts": 1,
    "kept_groups": 2,
}
"""Other values of fields that most values do not fit, or that differ by family."""

IDS = jax.ShapeDtypeStruct((2, 12), jnp.int32)


def other_values(family, field, hint, value):
    """Returns values of a field beside the one that it has."""
    if field in VALUES:
        given = VALUES[field]
        return [given.get(family) if isinstance(given, dict) and family in given else given]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [option for option in typing.get_args(hint) if option is not type(None)][:1]
    if typing.get_origin(hint) is typing.Literal:
        return [option for option in typing.get_args(hint) if option != value]
    if hint is bool:
        return [not value]
    return {int: [2 * (value or 1)], float: [0.5 * (value or 1.0)]}.get(hint, [])


def program(function, *arguments):
    """Yields what a function computes: its jaxpr, which names policies, and its StableHLO, which has constants."""
    traced = jax.jit(function).trace(*arguments)
    yield re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
    yield traced.lower().as_text()


def is_same(found, expected):
    """Compares programs as far as they are equal: a jaxpr that differs is not lowered."""
    return all(one == other for one, other in itertools.zip_longest(found, expected))


def programs(name, mapping):
    """Yields how a model is made, and its forward pass with the loss; or the refusal of its config."""
    family = registries.models[name]
    try:
        config = parse(family.config_class, mapping)
    except ConfigError as error:
        yield str(error)
        return
    build = lambda key: nnx.split(family.build(config, key=key))[1]
    graph, state = nnx.split(nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0))))

    images = {}
    if isinstance(config, SeesImages):
        arrays = config.image_arrays(row_images=1, seq_tokens=12)
        images = {name: jax.ShapeDtypeStruct((2, *array.shape), array.dtype) for name, array in arrays.items()}

    def loss(state, tokens, positions, segments, images):
        model = nnx.merge(graph, state)
        model.train()
        if isinstance(model, Encoder):
            batch = {"tokens": tokens, "positions": positions, "segment_ids": segments}
            return sum(jnp.sum(each) for each in model.on_batch(batch)), nnx.state(model)
        # Sources have other lengths than targets.
        others = {"source_tokens": tokens[:, :7]} if isinstance(model, EncoderDecoder) else images
        outputs = model(tokens, positions, segments, **others)
        further = [jnp.sum(each).astype(jnp.float32) for each in outputs.further]
        head = model.head().cross_entropy(outputs.hidden, tokens)
        return head + sum(jnp.sum(each) for each in outputs.facts.values()) + sum(further), nnx.state(model)

    of_build, of_loss = program(build, jax.random.key(0)), program(loss, state, IDS, IDS, IDS, images)
    yield next(of_build)
    yield from of_loss
    yield from of_build


def test_every_language_model_is_here():
    language_models = {
        name
        for name, family in registries.models.items()
        if "vocab_size" in {field.name for field in dataclasses.fields(family.config_class)}
    }
    assert language_models == set(FAMILIES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("llama", "gemma3", "bert") else pytest.mark.slow) for name in FAMILIES],
)
def test_every_field_of_a_language_model_changes_its_program_or_is_refused(name):
    config_class = registries.models[name].config_class
    fields = {field.name for field in dataclasses.fields(config_class)}
    mapping = {key: value for key, value in {**SIZES, **FAMILIES[name]}.items() if key in fields}
    base = parse(config_class, mapping)
    expected, hints, same = list(programs(name, mapping)), typing.get_type_hints(config_class), []
    for field in (field.name for field in dataclasses.fields(base) if field.name not in ELSEWHERE):
        others = other_values(name, field, hints[field], getattr(base, field))
        assert others, f"give another value of {field} in VALUES"
        same += [f"{field}={other}" for other in others if is_same(programs(name, {**mapping, field: other}), expected)]
    assert not same


AXES = {"matrix": ("embed", "mlp"), "scale": ("embed",)}
PARAMS = {"matrix": jax.ShapeDtypeStruct((256, 128), jnp.float32), "scale": jax.ShapeDtypeStruct((256,), jnp.float32)}
OPTIONAL = {
    "skip_spikes": {},
    "ema_decay": 0.9,
    "outer": {"every_steps": 1},
    "groups": {"scale": {"rate_factor": 0.5}},
    "qk_clip": 100,
}
"""Other values of an optimizer's fields that are off by default."""


def update_of(config):
    """Yields a step of an optimizer from its initial state, with the parameters that would be evaluated."""
    optimizer = config.build(40, AXES)
    # A step computes the factors of clipped weights.
    extra = {} if config.qk_clip is None else {"weight_factors": {("matrix",): jnp.full(128, 0.5)}}

    def update(gradients, params):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, optimizer.init(params), params, **extra)
            return updates, state, config.evaluation_params(params, state)

    return program(update, PARAMS, PARAMS)


@pytest.mark.parametrize("name", registries.optimizers.names())
def test_every_field_of_an_optimizer_changes_its_update(name):
    config_class = registries.optimizers[name]
    # A warm-up, after which the rate stays at its peak for a while, makes every part of the schedule act.
    schedule = {"warmup_steps": 4, "decay": "linear", "decay_fraction": 0.5}
    # schedule_free averages the weights already, and adafactor has factored moments.
    refused = {"schedule_free": ("ema_decay", "outer", "qk_clip"), "adafactor": ("moments",)}.get(name, ())
    schedules = [{"warmup_steps": 5}, {"decay": "cosine"}, {"decay_fraction": 0.25}, {"final_fraction": 0.2}]
    if name == "schedule_free":
        schedule, schedules = {"warmup_steps": 4, "decay": "constant"}, schedules[:1]
    base, hints = parse(config_class, {"schedule": schedule}), typing.get_type_hints(config_class)
    changes = [{"schedule": {**schedule, **each}} for each in schedules]
    for field in (field.name for field in dataclasses.fields(base) if field.name not in ("schedule", "name", *refused)):
        others = (
            [OPTIONAL[field]] if field in OPTIONAL else other_values(name, field, hints[field], getattr(base, field))
        )
        changes += [{field: other} for other in others]
    expected = list(update_of(base))
    others = ((each, parse(config_class, {"schedule": schedule, **each})) for each in changes)
    assert not [each for each, other in others if is_same(update_of(other), expected)]
