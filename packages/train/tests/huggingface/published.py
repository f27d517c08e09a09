"""Published checkpoints made small: the publishers' configs, and their tensors by name and shape.

`published/NAME/` has `config.json` as published, key by key, or as public copies of it say, and for most models
`generation_config.json`. The tensors are spelled out here apart from the code under test.

Of the models in `RECONSTRUCTED` no copy was at hand: their keys are those that transformers' config classes know, with
values from model cards and papers, and with parts of public copies where there were any.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

FOLDER = Path(__file__).parent / "published"
RECONSTRUCTED = (
    "ModernBERT-base",
    "DeepSeek-V2-Lite",
    "Kimi-K2-Instruct",
    "Olmo-3-7B-Instruct",
    "Phi-3-mini-4k-instruct",
    "Qwen1.5-MoE-A2.7B",
    "Qwen2.5-VL-7B-Instruct",
    "Seed-OSS-36B-Instruct",
    "SmolLM3-3B",
    "granite-3.0-1b-a400m-instruct",
    "granite-3.3-2b-instruct",
)
SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
SMALL_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 3, "num_layers": 2}
SMALL_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*E"}
    | {"mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5}
    | {"moe_shared_expert_intermediate_size": 20},
    "SmolLM3-3B": {"num_hidden_layers": 4},
    "Olmo-3-7B-Instruct": {"num_hidden_layers": 4},
    "GLM-4.5-Air": {"n_group": 1, "topk_group": 1},
    "DeepSeek-V2-Lite": {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    | {"v_head_dim": 8},
    "Kimi-K2-Instruct": {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    | {"qk_rope_head_dim": 4, "v_head_dim": 8},
    "gemma-3-4b-it": {"num_hidden_layers": 6},
    "t5-small": SMALL_T5,
    "t5-v1_1-base": {**SMALL_T5, "num_decoder_layers": 3},
    "gpt-oss-20b": {"intermediate_size": 64},
    "DeepSeek-V3": {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 12, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    "Qwen3-Next-80B-A3B-Instruct": {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""Sizes besides `SMALL` that keep each architecture's proportions."""

SMALL_VISION = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "image_size": 28
}
SMALL_GRID_VISION = {"hidden_size": 16, "intermediate_size": 20, "depth": 3, "num_heads": 2, "out_hidden_size": 32} | {
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [0, 1],
}
SMALL_WINDOWED_VISION = {"hidden_size": 16, "intermediate_size": 20, "depth": 3, "num_heads": 2} | {
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}
SMALL_PIXTRAL = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
Shapes = dict[str, tuple[int, ...]]


def published_config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text())


def small_config(name: str) -> dict[str, Any]:
    """Returns the published config with small sizes; keys that it does not have are left out, and the others stay."""
    whole = published_config(name)
    config = whole.get("text_config", whole)
    sizes = {**SMALL, **SMALL_EXPERTS, **OWN_SIZES.get(name, {})}
    added = ("hidden_size", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    implied = {key: sizes[key] for key in added if "text_config" in whole}  # which text_config leaves to defaults
    config |= {key: value for key, value in sizes.items() if config.get(key) is not None} | implied
    if whole["model_type"] == "gemma3":
        whole["vision_config"] |= SMALL_VISION
        whole["mm_tokens_per_image"] = 4
    if whole["model_type"] == "qwen3_vl":
        whole["vision_config"] |= SMALL_GRID_VISION
        config["rope_scaling"]["mrope_section"] = [2, 1, 1]
    if whole["model_type"] == "qwen2_5_vl":
        whole["vision_config"] |= SMALL_WINDOWED_VISION
        config["rope_scaling"]["mrope_section"] = [2, 1, 1]
    if whole["model_type"] == "mistral3":
        whole["vision_config"] |= {**SMALL_PIXTRAL, "head_dim": 8}
    for key in ("num_experts_per_tok", "experts_per_token"):
        if key in config:
            config[key] = 2
    for key in ("layer_types", "no_rope_layers", "attn_type_list"):
        if key in config:
            config[key] = config[key][: config["num_hidden_layers"]]
    return whole


def tensor_shapes(name: str, config: dict[str, Any]) -> Shapes:
    """The tensors of a checkpoint in float, without the parts of larger models that are not read."""
    text = config.get("text_config", config)
    kind = text["model_type"]
    if kind == "t5":
        return _t5(config)
    embed = text["hidden_size"]
    if kind in OTHERS:
        return OTHERS[kind](config, embed)
    shapes: Shapes = {"model.embed_tokens.weight": (text["vocab_size"], embed), "model.norm.weight": (embed,)}
    if not text.get("tie_word_embeddings", kind.startswith("gemma")) or name == "Qwen3-0.6B":
        shapes["lm_head.weight"] = (text["vocab_size"], embed)  # of Qwen3 0.6B a copy of the embedding
    for number in range(text["num_hidden_layers"]):
        layer = {**_norms(kind, embed), **_attention(text, number), **_feed_forward(text, number)}
        shapes |= {f"model.layers.{number}.{each}": shape for each, shape in layer.items()}
    shapes |= _predicts_later_tokens(text)
    if config["model_type"] == "qwen3_vl":
        inner = {each.removeprefix("model."): shape for each, shape in shapes.items() if each != "lm_head.weight"}
        inner = {f"model.language_model.{each}": shape for each, shape in inner.items()}
        return {**inner, "lm_head.weight": shapes["lm_head.weight"], **_grid_tower(config["vision_config"])}
    if config["model_type"] == "qwen2_5_vl":
        return shapes | _windowed_tower(config["vision_config"])
    if config["architectures"][0].endswith("ForConditionalGeneration"):
        shapes = {f"language_model.{each}": shape for each, shape in shapes.items()}
    if config["model_type"] == "gemma3":
        shapes |= _tower(config["vision_config"])
        shapes["multi_modal_projector.mm_input_projection_weight"] = (config["vision_config"]["hidden_size"], embed)
        shapes["multi_modal_projector.mm_soft_emb_norm.weight"] = (config["vision_config"]["hidden_size"],)
    if config["model_type"] == "mistral3":
        shapes |= _pixtral(config["vision_config"], config["spatial_merge_size"], embed)
    return shapes


def _windowed_tower(config: dict[str, Any]) -> Shapes:
    embed, mlp, patch = (config[name] for name in ("hidden_size", "intermediate_size", "patch_size"))
    merged = embed * config["spatial_merge_size"] ** 2
    shapes: Shapes = {"patch_embed.proj.weight": (embed, 3, 2, patch, patch), "merger.ln_q.weight": (embed,)}
    outs = {"merger.mlp.0": (merged, merged), "merger.mlp.2": (config["out_hidden_size"], merged)}
    for number in range(config["depth"]):
        block = f"blocks.{number}."
        shapes |= {f"{block}norm{each}.weight": (embed,) for each in (1, 2)}
        outs |= {f"{block}attn.qkv": (3 * embed, embed), f"{block}attn.proj": (embed, embed)}
        outs |= {f"{block}mlp.{name}_proj": (mlp, embed) for name in ("gate", "up")}
        outs[f"{block}mlp.down_proj"] = (embed, mlp)
    shapes |= {f"{name}.weight": shape for name, shape in outs.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in outs.items()}
    return {f"visual.{name}": shape for name, shape in shapes.items()}


def _pixtral(config: dict[str, Any], merge: int, width: int) -> Shapes:
    embed, mlp, patch = (config[name] for name in ("hidden_size", "intermediate_size", "patch_size"))
    shapes: Shapes = {"patch_conv.weight": (embed, 3, patch, patch), "ln_pre.weight": (embed,)}
    for number in range(config["num_hidden_layers"]):
        layer = {f"attention.{name}_proj.weight": (embed, embed) for name in "qkvo"}
        layer |= {f"{name}_norm.weight": (embed,) for name in ("attention", "ffn")} | _gated("feed_forward", embed, mlp)
        shapes |= {f"transformer.layers.{number}.{name}": shape for name, shape in layer.items()}
    pairs = {"norm": (embed,), "patch_merger.merging_layer": (embed, embed * merge**2)}
    pairs |= {"linear_1": (width, embed), "linear_2": (width, width)}
    tower = {f"vision_tower.{name}": shape for name, shape in shapes.items()}
    return {**tower, **{f"multi_modal_projector.{name}.weight": shape for name, shape in pairs.items()}}


def _bert(config: dict[str, Any], embed: int) -> Shapes:
    mlp, pairs = config["intermediate_size"], {"embeddings.LayerNorm": (embed,), "pooler.dense": (embed, embed)}
    for number in range(config["num_hidden_layers"]):
        layer = {f"attention.self.{name}": (embed, embed) for name in ("query", "key", "value")}
        layer |= {"attention.output.dense": (embed, embed), "attention.output.LayerNorm": (embed,)}
        layer |= {"intermediate.dense": (mlp, embed), "output.dense": (embed, mlp), "output.LayerNorm": (embed,)}
        pairs |= {f"encoder.layer.{number}.{name}": shape for name, shape in layer.items()}
    shapes = {f"{name}.weight": shape for name, shape in pairs.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in pairs.items()}
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    return shapes | {f"embeddings.{name}_embeddings.weight": (config[key], embed) for name, key in tables.items()}


def _modernbert(config: dict[str, Any], embed: int) -> Shapes:
    mlp = config["intermediate_size"]
    shapes = {"embeddings.tok_embeddings": (config["vocab_size"], embed), "embeddings.norm": (embed,)}
    for number in range(config["num_hidden_layers"]):
        layer = {"attn.Wqkv": (3 * embed, embed), "attn.Wo": (embed, embed), "mlp.Wi": (2 * mlp, embed)}
        layer |= {"mlp.Wo": (embed, mlp), "mlp_norm": (embed,), **({"attn_norm": (embed,)} if number else {})}
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"model.{name}.weight": shape for name, shape in {**shapes, "final_norm": (embed,)}.items()}


def _nemotron_h(config: dict[str, Any], embed: int) -> Shapes:
    heads, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    mixed = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    mamba: Shapes = {**dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)), "norm.weight": (inner,)}
    mamba |= {"conv1d.weight": (mixed, 1, config["conv_kernel"]), "conv1d.bias": (mixed,)}
    mamba |= {"in_proj.weight": (inner + mixed + heads, embed), "out_proj.weight": (embed, inner)}
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    attention = {"q_proj.weight": (queries, embed), "o_proj.weight": (embed, queries)}
    attention |= {f"{name}_proj.weight": (keys, embed) for name in "kv"}
    count = config["n_routed_experts"]
    experts: Shapes = {"gate.weight": (count, embed), "gate.e_score_correction_bias": (count,)}
    widths = {f"experts.{number}": config["moe_intermediate_size"] for number in range(count)}
    for place, width in {**widths, "shared_experts": config["moe_shared_expert_intermediate_size"]}.items():
        experts |= {f"{place}.up_proj.weight": (width, embed), f"{place}.down_proj.weight": (embed, width)}
    shapes = dict.fromkeys(("backbone.embeddings.weight", "lm_head.weight"), (config["vocab_size"], embed))
    shapes["backbone.norm_f.weight"] = (embed,)
    for number, kind in enumerate(config["hybrid_override_pattern"]):
        mixer = {"M": mamba, "*": attention, "E": experts}[kind]
        layer = {"norm.weight": (embed,), **{f"mixer.{name}": shape for name, shape in mixer.items()}}
        shapes |= {f"backbone.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


OTHERS = {"bert": _bert, "modernbert": _modernbert, "nemotron_h": _nemotron_h}
"""Tensors of models whose layers have other names."""


def _t5(config: dict[str, Any]) -> Shapes:
    embed, mlp, inner = config["d_model"], config["d_ff"], config["num_heads"] * config["d_kv"]
    gated = config.get("is_gated_act", False)
    wide = {f"DenseReluDense.{name}": (mlp, embed) for name in (("wi_0", "wi_1") if gated else ("wi",))}
    last = {**wide, "DenseReluDense.wo": (embed, mlp), "layer_norm": (embed,)}
    shapes: Shapes = {"shared": (config["vocab_size"], embed)}
    if gated:
        shapes["lm_head"] = (config["vocab_size"], embed)
    for side, kinds in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        count = config["num_layers"] if side == "encoder" else config.get("num_decoder_layers", config["num_layers"])
        parts = [{f"{kind}.{name}": (inner, embed) for name in "qkv"} | {f"{kind}.o": (embed, inner)} for kind in kinds]
        layers = [*({**part, "layer_norm": (embed,)} for part in parts), last]
        for number in range(count):
            for place, layer in enumerate(layers):
                shapes |= {f"{side}.block.{number}.layer.{place}.{name}": shape for name, shape in layer.items()}
        biases = (config["relative_attention_num_buckets"], config["num_heads"])
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"] = biases
        shapes[f"{side}.final_layer_norm"] = (embed,)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _tower(config: dict[str, Any]) -> Shapes:
    embed, mlp, patch = (config[name] for name in ("hidden_size", "intermediate_size", "patch_size"))
    shapes: Shapes = {
        "embeddings.patch_embedding.weight": (embed, 3, patch, patch),
        "embeddings.patch_embedding.bias": (embed,),
        "embeddings.position_embedding.weight": ((config["image_size"] // patch) ** 2, embed),
        "post_layernorm.weight": (embed,),
        "post_layernorm.bias": (embed,),
    }
    sizes = {f"self_attn.{name}_proj": (embed, embed) for name in ("q", "k", "v", "out")}
    sizes |= {"mlp.fc1": (mlp, embed), "mlp.fc2": (embed, mlp), "layer_norm1": (embed,), "layer_norm2": (embed,)}
    for number in range(config["num_hidden_layers"]):
        for name, shape in sizes.items():
            shapes[f"encoder.layers.{number}.{name}.weight"] = shape
            shapes[f"encoder.layers.{number}.{name}.bias"] = shape[:1]
    return {f"vision_tower.vision_model.{each}": shape for each, shape in shapes.items()}


def _grid_tower(config: dict[str, Any]) -> Shapes:
    embed, mlp, patch = (config[name] for name in ("hidden_size", "intermediate_size", "patch_size"))
    merged, width = embed * config["spatial_merge_size"] ** 2, config["out_hidden_size"]
    pairs = {"patch_embed.proj": (embed, 3, config["temporal_patch_size"], patch, patch)}
    for number in range(config["depth"]):
        layer = {"attn.qkv": (3 * embed, embed), "attn.proj": (embed, embed), "norm1": (embed,), "norm2": (embed,)}
        layer |= {"mlp.linear_fc1": (mlp, embed), "mlp.linear_fc2": (embed, mlp)}
        pairs |= {f"blocks.{number}.{name}": shape for name, shape in layer.items()}
    late = {f"deepstack_merger_list.{number}": merged for number in range(len(config["deepstack_visual_indexes"]))}
    for name, normed in {"merger": embed, **late}.items():
        pairs |= {f"{name}.norm": (normed,), f"{name}.linear_fc1": (merged, merged)}
        pairs[f"{name}.linear_fc2"] = (width, merged)
    shapes = {f"{name}.weight": shape for name, shape in pairs.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in pairs.items()}
    shapes["pos_embed.weight"] = (config["num_position_embeddings"], embed)
    return {f"model.visual.{each}": shape for each, shape in shapes.items()}


def _predicts_later_tokens(config: dict[str, Any]) -> Shapes:
    """The layer of multi-token prediction, behind the others or, of Qwen3-Next, under `mtp`."""
    kind, embed, number = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    if kind not in ("deepseek_v3", "glm4_moe", "qwen3_next"):
        return {}
    full = config.get("full_attention_interval", 1) - 1
    layer = {**_norms(kind, embed), **_attention(config, full), **_feed_forward(config, number)}
    if kind == "qwen3_next":
        outer = {f"{name}.weight": (embed,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        outer["fc.weight"] = (embed, 2 * embed)
        inner = {f"layers.0.{name}": shape for name, shape in layer.items()}
        return {f"mtp.{name}": shape for name, shape in {**outer, **inner}.items()}
    layer |= {f"{name}.weight": (embed,) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer["eh_proj.weight"] = (embed, 2 * embed)
    layer |= {f"{name}.weight": (config["vocab_size"], embed) for name in ("embed_tokens", "shared_head.head")}
    return {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}


def _norms(kind: str, embed: int) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if kind in ("olmo2", "olmo3"):
        names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (embed,) for name in names}


def _attention(config: dict[str, Any], number: int) -> Shapes:
    kind, embed, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    if kind in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        queries: Shapes = {"self_attn.q_proj.weight": (heads * (nope + rope), embed)}
        if config["q_lora_rank"]:
            queries = {
                "self_attn.q_a_proj.weight": (config["q_lora_rank"], embed),
                "self_attn.q_a_layernorm.weight": (config["q_lora_rank"],),
                "self_attn.q_b_proj.weight": (heads * (nope + rope), config["q_lora_rank"]),
            }
        return queries | {
            "self_attn.kv_a_proj_with_mqa.weight": (config["kv_lora_rank"] + rope, embed),
            "self_attn.kv_a_layernorm.weight": (config["kv_lora_rank"],),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), config["kv_lora_rank"]),
            "self_attn.o_proj.weight": (embed, heads * value),
        }
    if kind == "qwen3_next" and (number + 1) % config["full_attention_interval"]:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return {
            "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, embed),
            "linear_attn.in_proj_ba.weight": (2 * config["linear_num_value_heads"], embed),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (config["linear_num_value_heads"],),
            "linear_attn.dt_bias": (config["linear_num_value_heads"],),
            "linear_attn.norm.weight": (config["linear_value_head_dim"],),
            "linear_attn.out_proj.weight": (embed, values),
        }
    size = config.get("head_dim") or embed // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    if kind == "phi3":
        return {"self_attn.qkv_proj.weight": (queries + 2 * keys, embed), "self_attn.o_proj.weight": (embed, queries)}
    gate = 2 if kind == "qwen3_next" else 1
    outs = {"q_proj": (gate * queries, embed), "k_proj": (keys, embed), "v_proj": (keys, embed)}
    outs["o_proj"] = (embed, queries)
    shapes: Shapes = {f"self_attn.{name}.weight": shape for name, shape in outs.items()}
    inputs = ("q_proj", "k_proj", "v_proj")
    biased = {
        "gpt_oss": tuple(outs),
        **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_moe", "seed_oss", "glm4_moe"), inputs),
    }.get(kind, ())
    shapes |= {f"self_attn.{name}.bias": outs[name][:1] for name in biased}
    if kind == "gpt_oss":
        shapes["self_attn.sinks"] = (heads,)
    if kind in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "gemma3_text"):
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    if kind in ("olmo2", "olmo3", "minimax_m2"):
        shapes |= {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    return shapes


def _gated(prefix: str, embed: int, mlp: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (mlp, embed), up: (mlp, embed), down: (embed, mlp)}


def _feed_forward(config: dict[str, Any], number: int) -> Shapes:
    kind, embed, mlp = config["model_type"], config["hidden_size"], config["intermediate_size"]
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if kind in ("phi3", "gpt_oss", "granitemoe"):
        return _joined(kind, embed, mlp, count)
    if count is None or number < config.get("first_k_dense_replace", 0):
        return _gated("mlp", embed, mlp)
    if kind in ("mixtral", "minimax_m2"):
        shapes: Shapes = {"block_sparse_moe.gate.weight": (count, embed)}
        if kind == "minimax_m2":
            shapes["block_sparse_moe.e_score_correction_bias"] = (count,)
        for expert in range(count):
            shapes |= _gated(f"block_sparse_moe.experts.{expert}", embed, mlp, ("w1", "w3", "w2"))
        return shapes
    width = config["moe_intermediate_size"]
    shapes = {"mlp.gate.weight": (count, embed)}
    for expert in range(count):
        shapes |= _gated(f"mlp.experts.{expert}", embed, width)
    if kind in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    if "n_shared_experts" in config:
        shapes |= _gated("mlp.shared_experts", embed, config["n_shared_experts"] * width)
    if "shared_expert_intermediate_size" in config:
        shapes["mlp.shared_expert_gate.weight"] = (1, embed)
        shapes |= _gated("mlp.shared_expert", embed, config["shared_expert_intermediate_size"])
    return shapes


def _joined(kind: str, embed: int, mlp: int, count: int | None) -> Shapes:
    """The feed-forward layers with gate and up projections in one tensor."""
    if count is None:
        return {"mlp.gate_up_proj.weight": (2 * mlp, embed), "mlp.down_proj.weight": (embed, mlp)}
    if kind == "granitemoe":
        return {
            "block_sparse_moe.router.layer.weight": (count, embed),
            "block_sparse_moe.input_linear.weight": (count, 2 * mlp, embed),
            "block_sparse_moe.output_linear.weight": (count, embed, mlp),
        }
    return {
        "mlp.router.weight": (count, embed),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, embed, 2 * mlp),
        "mlp.experts.gate_up_proj_bias": (count, 2 * mlp),
        "mlp.experts.down_proj": (count, mlp, embed),
        "mlp.experts.down_proj_bias": (count, embed),
    }


def small_checkpoint(name: str, directory: Path, *, files: int = 3) -> dict[str, np.ndarray]:
    """Writes a small checkpoint in the publisher's layout; returns the tensors of the language model in its files."""
    random, config = np.random.default_rng(0), small_config(name)
    tensors = {
        each: random.normal(size=shape).astype(ml_dtypes.bfloat16)
        for each, shape in tensor_shapes(name, config).items()
    }
    if name == "Qwen3-0.6B":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for each in [each for each in tensors if each.endswith(("e_score_correction_bias", "mixer.gate.weight"))]:
        tensors[each] = tensors[each].astype(np.float32)
    if name in ("DeepSeek-V3", "GLM-4.5-Air"):
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    coded = _coded(tensors, config.get("quantization_config"))
    beside = {}
    if config["model_type"] == "modernbert":
        beside = {"head.norm.weight": np.ones(32, ml_dtypes.bfloat16), "decoder.bias": np.ones(53, ml_dtypes.bfloat16)}
    _write(directory, config, {**coded, **beside}, files)
    generation = FOLDER / name / "generation_config.json"
    text = generation.read_text() if generation.exists() else '{"do_sample": true}\n'
    (directory / "generation_config.json").write_text(text)
    words = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    (directory / "tokenizer.json").write_text(words.to_str())
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}\n')
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}\n')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return tensors


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], files: int) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    located = {each: names[place * files // len(tensors)] for place, each in enumerate(sorted(tensors))}
    for file in names:
        held = {each: tensors[each] for each in tensors if located[each] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": located}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _coded(tensors: dict[str, np.ndarray], coding: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """The tensors as they are published: gpt-oss' experts in MXFP4, DeepSeek-V3's matrices in FP8."""
    if coding is None:
        return tensors
    found, random = dict[str, np.ndarray](), np.random.default_rng(1)
    for name, tensor in tensors.items():
        if coding["quant_method"] == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, d_in, d_out = tensor.shape
            codes = random.integers(0, 256, (experts, d_out, d_in // 32, 16), np.uint8)
            found[f"{name}_blocks"], found[f"{name}_scales"] = codes, np.full(codes.shape[:-1], 127, np.uint8)
        elif coding["quant_method"] == "fp8" and "_proj" in name and "eh_proj" not in name:
            found[name] = tensor.astype(ml_dtypes.float8_e4m3fn)
            found[f"{name}_scale_inv"] = np.ones([-(-size // 128) for size in tensor.shape], np.float32)
        else:
            found[name] = tensor
    return found
