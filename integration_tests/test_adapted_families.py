"""Which parameters of every family take adapters and nf4: the table in docs/adapters.md, which this module writes.

python integration_tests/test_adapted_families.py > docs/adapters.md
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.models import LanguageModel, RunsOnBatches
from stack_core.abi.plugins import registries
from stack_quant.batch_calls import call_on_batches
from stack_quant.lora.planning import add_adapters, factors_of
from stack_quant.lora.rules import AdapterRule
from stack_quant.nnx_model import ModuleProgram, plain_module
from stack_quant.recipes import load_recipe
from stack_quant.section import QuantConfig, Quantization
from stack_train.contrastive.dual_encoder import DualEncoder
from stack_train.contrastive.siglip import SiglipTextConfig
from stack_train.diffusion.clip import ClipTextSize
from stack_train.models.encoder import Encoder
from stack_train.models.encoder_decoder import EncoderDecoder
from stack_train.run.model import abstract_model
from stack_train.vision.clip import ClipVisionConfig
from stack_train.vision.siglip import SiglipConfig

TABLE = Path(__file__).parents[1] / "docs" / "adapters.md"
HEAD = """\
# Adapters and nf4, by family

The parameters of each family that support low-rank adapters (`lora:` with path `blocks`; `.*_blocks` for `flux`,
`.*blocks?` for `sd3`, `.*attentions.*` for `unet`, `.*/blocks` for `clip` and `siglip`, all paths for
autoencoders), and the subset that the recipe `nf4` leaves unquantized. In matrix products, adapters are applied
as two low-rank products. In convolutions (marked *), the adapter is added to the kernel first. Parameters without a
product, such as norms and biases, support neither.
"""
PATHS = {"flux": ".*_blocks", "sd3": ".*blocks?", "unet": ".*attentions.*"}
PATHS |= dict.fromkeys(("autoencoder_kl", "autoencoder_kl_wan", "autoencoder_kl_ltx"), ".*")
PATHS |= dict.fromkeys(("clip", "siglip"), ".*/blocks")
SMALL = {"vocab_size": 64, "embed": 64, "heads": 4, "mlp": 64, "max_positions": 32}
FEW = ("llama", "deepseek_v3", "qwen3_next")  # every kind of layer with products but convolutions
SLOW = pytest.mark.slow
NARROW = {
    "mixtral": {"experts": 4, "active_experts": 2},
    "qwen3_moe": {"experts": 4, "active_experts": 2, "expert_mlp": 64, "dense_layers": (0,)},
    "gemma3": {"layers": 3, "period": 2, "query_scalar": 16},
    "gemma4": {"layers": 4, "global_layers": (1, 3), "shared_layers": 2, "per_layer_input": 64},
    "gemma4_vision": {"layers": 4, "global_layers": (1, 3), "shared_layers": 2, "per_layer_input": 64},
    "gemma3_vision": {"layers": 3, "period": 2, "query_scalar": 16},
    "qwen2_5_vl": {"layers": 3, "rope_sections": (4, 2, 2)},
    "qwen3_vl": {"layers": 3, "rope_sections": (4, 2, 2)},
    "qwen3_vl_moe": {"experts": 4, "active_experts": 2, "expert_mlp": 64, "dense_layers": (0,)}
    | {"layers": 3, "rope_sections": (4, 2, 2)},
    "deepseek_v3": {"query_rank": 64, "kv_rank": 64, "nope_dim": 16, "rope_dim": 8, "value_dim": 16, "experts": 4}
    | {"active_experts": 2, "expert_mlp": 64, "expert_groups": 2, "kept_groups": 1},
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        {"query_rank": 64, "kv_rank": 64, "nope_dim": 16, "rope_dim": 8, "value_dim": 16, "experts": 4}
        | {"active_experts": 2, "expert_mlp": 64, "index_heads": 2, "index_dim": 32, "index_count": 4},
    ),
    "deepseek_v4": {"layers": 3, "kinds": ("window", "sparse", "heavy"), "query_rank": 64, "rope_dim": 8}
    | {"output_groups": 2, "output_rank": 32, "sparse_rate": 2, "heavy_rate": 4, "index_heads": 2, "index_dim": 32}
    | {"index_count": 2, "experts": 4, "active_experts": 2, "hash_layers": 1, "streams": 2, "stream_iterations": 2},
    "dit": {"image_size": 8, "head_dim": 16},
    "flux": {"image_size": 8, "head_dim": 16, "rope_axes": (4, 6, 6), "text_dim": 64, "pooled_dim": 64}
    | {"text_tokens": 4, "double_layers": 2, "single_layers": 2},
    "sd3": {"image_size": 8, "head_dim": 16, "text_dim": 64, "pooled_dim": 64, "text_tokens": 4, "max_patches": 5}
    | {"layers": 3, "dual_layers": 1, "qk_norm": True},
    "unet": {"image_size": 4, "widths": (64, 64), "heads": (2, 2), "transformer_layers": (0, 2), "blocks_per_level": 1}
    | {"text_dim": 64, "pooled_dim": 64, "text_tokens": 4, "size_features": 16},
    "wan": {"image_size": 8, "frames": 2, "head_dim": 16, "text_dim": 64, "text_tokens": 4, "time_features": 64}
    | {"extra_channels": 6, "image_dim": 64, "image_tokens": 5},
    "ltx": {"image_size": 4, "frames": 2, "head_dim": 16, "text_dim": 64, "text_tokens": 4, "channels": 64},
    "autoencoder_kl": {"image_size": 8, "widths": (64, 64), "groups": 4, "blocks_per_level": 1},
    "autoencoder_kl_wan": {"image_size": 8, "frames": 3, "width": 64, "multipliers": (1, 2), "blocks_per_level": 1}
    | {"halves_frames": (True,)},
    "autoencoder_kl_ltx": {"image_size": 8, "frames": 3, "patch": 2, "widths": (64, 128, 128), "blocks": (1, 1, 1)}
    | {"downsamples": ("conv", None), "decoder_widths": (64, 128), "decoder_blocks": (1, 1, 1)}
    | {"upsamples": (True, False), "upsample_factors": (1, 1), "upsample_residual": (False, False)}
    | {"adds_noise": (False, False, False)},
    "qwen3_next": {"layers": 3, "period": 2, "key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    | {"experts": 4, "active_experts": 2, "expert_mlp": 64, "shared_mlp": 64},
    "qwen3_5": {"layers": 3, "period": 2, "key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 32},
    "qwen2_moe": {"experts": 4, "active_experts": 2, "expert_mlp": 64, "shared_mlp": 64},
    "glm4_moe": {"experts": 4, "active_experts": 2, "expert_mlp": 64},
    "deepseek_v2": {
        "kv_rank": 64,
        "nope_dim": 16,
        "rope_dim": 8,
        "value_dim": 16,
        "experts": 4,
        "active_experts": 2,
        "expert_mlp": 64,
    },
    "granite_moe": {"experts": 4, "active_experts": 2},
    "bamba": {"layers": 3, "attention_layers": (1,), "mamba_heads": 4, "mamba_head_dim": 32, "mamba_state": 32},
    "granite_moe_hybrid": {"layers": 3, "attention_layers": (1,), "mamba_heads": 4, "mamba_head_dim": 32}
    | {"mamba_state": 32, "experts": 4, "active_experts": 2, "shared_mlp": 64},
    "nemotron_h": {"layers": 4, "pattern": "ME*-", "mamba_heads": 4, "mamba_head_dim": 32, "mamba_state": 32}
    | {"mamba_groups": 1, "experts": 4, "active_experts": 2, "expert_mlp": 64, "shared_mlp": 64},
    "minimax": {"layers": 3, "attention_layers": (1,), "experts": 4, "active_experts": 2},
    "minimax_m2": {"experts": 4, "active_experts": 2},
    "qwen3_5_moe": {
        "layers": 3,
        "period": 2,
        "key_heads": 2,
        "value_heads": 2,
        "key_dim": 32,
        "value_dim": 32,
        "experts": 4,
        "active_experts": 2,
        "shared_mlp": 64,
    },
    "llama4": {"experts": 4, "active_experts": 2, "expert_mlp": 64},
    **{
        name: {
            "vision": vision(embed=64, heads=4, mlp=64, layers=2, image_size=8, patch=4),
            "text": text(vocab_size=64, embed=64, heads=4, mlp=64, layers=2, max_positions=8),
        }
        for name, vision, text in (("clip", ClipVisionConfig, ClipTextSize), ("siglip", SiglipConfig, SiglipTextConfig))
    },
}


def fields_of(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(registries.models[name].config_class)}


def small_model(name: str) -> Any:
    """A family's smallest model that has every kind of layer, without values."""
    fields = fields_of(name)
    sizes = {key: value for key, value in {**SMALL, "layers": 2, **NARROW.get(name, {})}.items() if key in fields}
    return abstract_model(registries.models[name].config_class(name=name, **sizes))


def batch_of(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of a model's data."""
    if isinstance(model, LanguageModel | Encoder):
        sources = ("source_tokens", "source_segment_ids") if isinstance(model, EncoderDecoder) else ()
        names = ("tokens", "positions", "segment_ids", *sources)
        return {key: jax.ShapeDtypeStruct((2, 8), jnp.int32) for key in names}
    assert isinstance(model, RunsOnBatches)
    config, float32 = model.config, jnp.float32
    if isinstance(model, DualEncoder):
        side = config.vision.image_size
        pixels = jax.ShapeDtypeStruct((2, side, side, config.vision.channels), jnp.uint8)
        return {"pixels": pixels, "tokens": jax.ShapeDtypeStruct((2, config.text.max_positions), jnp.int32)}
    frames = (config.frames,) if hasattr(config, "frames") else ()
    images = jax.ShapeDtypeStruct((2, *frames, config.image_size, config.image_size, config.channels), float32)
    batch = {"images": images, "weights": jax.ShapeDtypeStruct((2,), float32)}
    if config.classes:
        return batch | {"labels": jax.ShapeDtypeStruct((2,), jnp.int32)}
    if not hasattr(config, "text_dim"):
        return batch
    text = jax.ShapeDtypeStruct((2, config.text_tokens, config.text_dim), float32)
    batch |= {"text": text}
    batch |= {"pooled": jax.ShapeDtypeStruct((2, config.pooled_dim), float32)} if config.pooled_dim else {}
    if hasattr(config, "image_dim"):
        frame = (*batch["images"].shape[:-1], config.extra_channels)
        batch |= {"first_frame": jax.ShapeDtypeStruct(frame, float32)}
        batch |= {"image_features": jax.ShapeDtypeStruct((2, config.image_tokens, config.image_dim), float32)}
    return batch | ({"sizes": jax.ShapeDtypeStruct((2, 6), float32)} if hasattr(config, "size_features") else {})


def row(name: str) -> str:
    model = small_model(name)
    batch, rule = batch_of(model), AdapterRule(path=PATHS.get(name, "blocks"))
    quantized: Any = Quantization(QuantConfig(rules=load_recipe("nf4")), batch).apply(model)
    program = ModuleProgram.of(plain_module(quantized), (), batch, call_on_batches(model))
    arrays, traced = program.parameters.arrays, program.trace()
    resolved = add_adapters([rule], traced, arrays, quantized.quantization.resolved, bool)
    factors = factors_of(resolved.adapters, arrays, jax.random.key(0), "float32")
    rows = traced.survey(arrays, resolved, factors).rows
    merged = {path for each in rows if "are merged" in each.reason for path in each.paths}
    assert all(arrays[path].ndim in (4, 5) for path in merged), merged
    nf4 = {path for path, spec in resolved.specs.items() if spec.type == "nf4"}
    names: dict[str, bool] = {}
    for path in resolved.adapters:
        names[_place(path) + "*" * (path in merged)] = path in nf4
    left = ", ".join(place for place, is_nf4 in names.items() if not is_nf4) or "none"
    return f"| {name} | {', '.join(names)} | {left} |"


def _place(path: str) -> str:
    """A parameter's path without its kernel and the numbers of layers, and in language models without the stack's."""
    parts = path.removesuffix("/kernel").split("/")
    return "/".join(part for part in (parts[1:] if parts[0] == "blocks" else parts) if not part.isdigit())


def page() -> str:
    rows = "\n".join(map(row, sorted(registries.models)))
    return f"{HEAD}\n| family | adapters | adapters but not nf4 |\n|---|---|---|\n{rows}\n"


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=SLOW) for name in sorted(registries.models)]
)
def test_the_table_says_what_a_family_takes(name: str) -> None:
    assert row(name) in TABLE.read_text(encoding="utf-8").splitlines()


def test_the_table_has_every_family() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    listed = {line.split("|")[1].strip() for line in lines if line.startswith("| ")}
    assert set(registries.models) == listed - {"family"}


if __name__ == "__main__":
    sys.stdout.write(page())
