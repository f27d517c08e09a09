"""Llama: a dense decoder with RMS norms, rotary positions, grouped-query attention and gated feed-forward layers.

Outputs match transformers' `LlamaForCausalLM`.

Source: Touvron et al., LLaMA, 2023 (arXiv:2302.13971); grouped queries and scaled rotary positions as in Llama 3, 2024
(arXiv:2407.21783).
"""

from typing import Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "LlamaConfig"]


@config
class LlamaConfig(DecoderConfig):
    """Size and numerics of a Llama; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to the projections of attention.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["llama"] = "llama"
    norm_epsilon: PositiveFloat = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


def spec(config: LlamaConfig) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    layer = Layer(
        attention=config.attention(bias=config.attention_bias, output_bias=config.attention_bias),
        feed_forward=Gated(width=config.mlp, bias=config.mlp_bias),
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="llama",
    config_class=LlamaConfig,
    config_map=ConfigMap(
        architecture="LlamaForCausalLM",
        model_type="llama",
        settings=(Setting("attention_bias", ("attention_bias",), False), Setting("mlp_bias", ("mlp_bias",), False)),
        fixed={"hidden_act": "silu", "pretraining_tp": 1},
    ),
    spec=spec,
    sizes=("8B", "70B", "405B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages", "compiled"),
)
