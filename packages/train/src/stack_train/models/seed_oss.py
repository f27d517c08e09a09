"""Seed-OSS: a Llama with query, key and value biases and an independent head width.

Outputs match transformers' `SeedOssForCausalLM`.

Source: ByteDance Seed Team, Seed-OSS Open-Source Models, 2025.
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "SeedOssConfig"]


@config
class SeedOssConfig(DecoderConfig):
    """Size and numerics of a Seed-OSS; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to queries, keys and values.
      output_bias: adds a bias to the output of attention.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["seed_oss"] = "seed_oss"
    attention_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False


def spec(config: SeedOssConfig) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    layer = Layer(
        attention=config.attention(bias=config.attention_bias, output_bias=config.output_bias),
        feed_forward=Gated(width=config.mlp, bias=config.mlp_bias),
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="seed_oss",
    config_class=SeedOssConfig,
    config_map=ConfigMap(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        settings=(
            Setting("vocab_size", ("vocab_size",), 155_136),
            Setting("layers", ("num_hidden_layers",), 64),
            Setting("heads", ("num_attention_heads",), 80),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 27_648),
            Setting("max_positions", ("max_position_embeddings",), 524_288),
            Setting("attention_bias", ("attention_bias",), True),
            Setting("output_bias", ("attention_out_bias",), False),
            Setting("mlp_bias", ("mlp_bias",), False),
        ),
        fixed={"hidden_act": "silu", "pretraining_tp": 1},
        silent=("residual_dropout",),  # published as 0.1, and without an effect in inference
    ),
    spec=spec,
    sizes=("36B",),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
