"""Granite 3: a Llama with fixed scales of embeddings, attention scores, residual sums and logits.

Outputs match transformers' `GraniteForCausalLM`.

Source: Granite Team, Granite 3.0 Language Models, 2024; the scales are of Yang et al., Tensor Programs V, 2022
(arXiv:2203.03466).
"""

from typing import Any, Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "GRANITE_SETTINGS", "GraniteConfig", "ScaledConfig", "scaled_spec"]


@config
class ScaledConfig(DecoderConfig):
    """Settings of a decoder with fixed scales; inherits the fields of `DecoderConfig`.

    Attributes:
      embedding_scale: factor of the embedded tokens.
      attention_scale: factor of the attention scores; None is head_dim ** -0.5.
      residual_scale: factor of the outputs of attention and feed-forward layers in the residual sum.
      logit_divisor: divisor of the logits.
      attention_bias: adds biases to the projections of attention.
    """

    embedding_scale: PositiveFloat = 1.0
    attention_scale: PositiveFloat | None = None
    residual_scale: PositiveFloat = 1.0
    logit_divisor: PositiveFloat = 1.0
    attention_bias: bool = False

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale


@config
class GraniteConfig(ScaledConfig):
    """Size and numerics of a Granite; inherits the fields of `ScaledConfig`.

    Attributes:
      name: selects this family.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["granite"] = "granite"
    mlp_bias: bool = False


def scaled_spec(config: ScaledConfig, feed_forward: TokenLayer) -> DecoderSpec:
    """Returns the architecture with identical layers, which have this feed-forward layer."""
    fields: dict[str, Any] = {"bias": config.attention_bias, "output_bias": config.attention_bias}
    attention = config.attention(scale=config.score_scale, **fields)
    layer = Layer(attention=attention, feed_forward=feed_forward, residual_scale=config.residual_scale)
    return DecoderSpec(
        layers=(layer,) * config.layers,
        norm=Norm(epsilon=config.norm_epsilon),
        embedding_scale=config.embedding_scale,
        logit_scale=1 / config.logit_divisor,
    )


def spec(config: GraniteConfig) -> DecoderSpec:
    return scaled_spec(config, Gated(width=config.mlp, bias=config.mlp_bias))


GRANITE_SETTINGS = (
    Setting("embedding_scale", ("embedding_multiplier",), 1.0),
    Setting("attention_scale", ("attention_multiplier",), 1.0, "score_scale"),
    Setting("residual_scale", ("residual_multiplier",), 1.0),
    Setting("logit_divisor", ("logits_scaling",), 1.0),
    Setting("attention_bias", ("attention_bias",), False),
)
"""The settings of a `ScaledConfig`."""

FAMILY = DecoderFamily(
    name="granite",
    config_class=GraniteConfig,
    config_map=ConfigMap(
        architecture="GraniteForCausalLM",
        model_type="granite",
        settings=(*GRANITE_SETTINGS, Setting("mlp_bias", ("mlp_bias",), False)),
        fixed={"hidden_act": "silu"},
    ),
    spec=spec,
    sizes=("2B", "8B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
