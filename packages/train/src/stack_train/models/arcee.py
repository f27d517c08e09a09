"""Arcee: a Llama whose feed-forward layers lack a gate and square their activations.

Outputs match transformers' `ArceeForCausalLM`.

Source: Arcee AI, Announcing Arcee Foundation Models, 2025; activations from So et al., Primer, 2021 (arXiv:2109.08668).
"""

from typing import Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Plain
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "ArceeConfig"]


@config
class ArceeConfig(DecoderConfig):
    """Size and numerics of an Arcee; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to the projections of attention.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["arcee"] = "arcee"
    norm_epsilon: PositiveFloat = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


def spec(config: ArceeConfig) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    layer = Layer(
        attention=config.attention(bias=config.attention_bias, output_bias=config.attention_bias),
        feed_forward=Plain(width=config.mlp, activation="relu_squared", bias=config.mlp_bias),
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="arcee",
    config_class=ArceeConfig,
    config_map=ConfigMap(
        architecture="ArceeForCausalLM",
        model_type="arcee",
        settings=(
            Setting("embed", ("hidden_size",), 2560),
            Setting("mlp", ("intermediate_size",), 18_432),
            Setting("max_positions", ("max_position_embeddings",), 4096),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("attention_bias", ("attention_bias",), False),
            Setting("mlp_bias", ("mlp_bias",), False),
        ),
        fixed={"hidden_act": "relu2"},
    ),
    spec=spec,
    sizes=("AFM 4.5B",),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
