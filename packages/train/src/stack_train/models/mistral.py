"""Mistral: a Llama with optional sliding-window attention in all layers.

Outputs match transformers' `MistralForCausalLM`.

Source: Jiang et al., Mistral 7B, 2023 (arXiv:2310.06825).
"""

from typing import Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "MistralConfig"]


@config
class MistralConfig(DecoderConfig):
    """Size and numerics of a Mistral; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      window: size of the attention window in tokens, the query included; None attends to all tokens.
    """

    name: Literal["mistral"] = "mistral"
    window: PositiveInt | None = None


def spec(config: MistralConfig) -> DecoderSpec:
    layer = Layer(attention=config.attention(window=config.window), feed_forward=Gated(width=config.mlp))
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="mistral",
    config_class=MistralConfig,
    config_map=ConfigMap(
        architecture="MistralForCausalLM",
        model_type="mistral",
        settings=(
            Setting("mlp", ("intermediate_size",), 14_336),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("window", ("sliding_window",), 4096),
        ),
        fixed={"hidden_act": "silu"},
    ),
    spec=spec,
    sizes=("7B", "24B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages", "compiled"),
)
