"""OLMo 2: norms after attention and feed-forward layers instead of before, and query and key norms over all heads.

Outputs match transformers' `Olmo2ForCausalLM`.

Source: OLMo Team, 2 OLMo 2 Furious, 2025 (arXiv:2501.00656).
"""

from typing import Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.models.weight_map import Names
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "OLMO_NAMES", "Olmo2Config"]


@config
class Olmo2Config(DecoderConfig):
    """Size and numerics of an OLMo 2; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to the projections of attention.
    """

    name: Literal["olmo2"] = "olmo2"
    norm_epsilon: PositiveFloat = 1e-5
    attention_bias: bool = False


def spec(config: Olmo2Config) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    bias = config.attention_bias
    layer = Layer(
        attention=config.attention(whole_norms=True, bias=bias, output_bias=bias),
        feed_forward=Gated(width=config.mlp),
        input_norms=False,
        output_norms=True,
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


OLMO_NAMES: Names = {
    "attention_output_norm": "post_attention_layernorm.weight",
    "feed_forward_output_norm": "post_feedforward_layernorm.weight",
}
"""Tensor names of the norms in layers that normalize outputs only."""

FAMILY = DecoderFamily(
    name="olmo2",
    config_class=Olmo2Config,
    config_map=ConfigMap(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        settings=(
            Setting("vocab_size", ("vocab_size",), 50_304),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("attention_bias", ("attention_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
    ),
    spec=spec,
    names=OLMO_NAMES,
    sizes=("1B", "7B", "13B", "32B"),
    tested=("logits", "greedy", "conversion", "pages"),
)
