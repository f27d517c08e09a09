"""ERNIE 4.5, dense: a Llama whose rotary positions turn adjacent features.

Outputs match transformers' `Ernie4_5ForCausalLM`.

Source: Baidu, ERNIE 4.5 Technical Report, 2025.
"""

from functools import partial
from typing import Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting, read_rope
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Ernie45Config"]


@config
class Ernie45Config(DecoderConfig):
    """Size and numerics of a dense ERNIE 4.5; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      bias: adds biases to all products of the layers.
    """

    name: Literal["ernie4_5"] = "ernie4_5"
    norm_epsilon: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 500_000.0
    tie_embeddings: bool = True
    bias: bool = False


def spec(config: Ernie45Config) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, interleaved=True)
    layer = Layer(
        attention=config.attention(rope=rope, bias=config.bias, output_bias=config.bias),
        feed_forward=Gated(width=config.mlp, bias=config.bias),
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="ernie4_5",
    config_class=Ernie45Config,
    config_map=ConfigMap(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        settings=(
            Setting("vocab_size", ("vocab_size",), 103_424),
            Setting("embed", ("hidden_size",), 1024),
            Setting("mlp", ("intermediate_size",), 3072),
            Setting("layers", ("num_hidden_layers",), 18),
            Setting("heads", ("num_attention_heads",), 16),
            Setting("kv_heads", ("num_key_value_heads",), 2, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("tie_embeddings", ("tie_word_embeddings",), True),
            Setting("bias", ("use_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
        read_others=partial(read_rope, theta=500_000.0),
    ),
    spec=spec,
    sizes=("0.3B",),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
