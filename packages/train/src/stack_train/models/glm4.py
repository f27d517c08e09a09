"""GLM-4, dense: norms before and after each layer, rotary positions on adjacent features of half of a head.

Outputs match transformers' `Glm4ForCausalLM`.

Source: Team GLM, ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools, 2024 (arXiv:2406.12793);
the norms after each layer are those of GLM-4-0414.
"""

from typing import Any, Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Glm4Config"]


@config
class Glm4Config(DecoderConfig):
    """Size and numerics of a GLM-4; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      rotary_share: fraction of a head's features with rotary positions.
      attention_bias: adds biases to queries, keys and values.
    """

    name: Literal["glm4"] = "glm4"
    norm_epsilon: PositiveFloat = 1.5625e-7
    rotary_share: PositiveFloat = 0.5
    attention_bias: bool = True


def spec(config: Glm4Config) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    rotary_dim = int(config.head_size * config.rotary_share)
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=rotary_dim, interleaved=True)
    layer = Layer(
        attention=config.attention(rope=rope, bias=config.attention_bias),
        feed_forward=Gated(width=config.mlp),
        output_norms=True,
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    rope = read_rope(reader, handled=("partial_rotary_factor",))
    return {**rope, "rotary_share": read_rotary_share(reader, 0.5)}


def _write(config: Glm4Config) -> dict[str, Any]:
    return {**write_rope(config), "partial_rotary_factor": config.rotary_share}


def _half(place: int) -> Stored:
    """Returns one half of the fused matrix of gate and up projection, in torch's [d_out, d_in] layout."""
    return Stored(name="mlp.gate_up_proj.weight", transposed=True, part=(place, 2), part_axis=-2)


_NAMES: Names = {
    "attention_output_norm": "post_self_attn_layernorm.weight",
    "feed_forward_output_norm": "post_mlp_layernorm.weight",
    "feed_forward/gate/kernel": _half(0),
    "feed_forward/up/kernel": _half(1),
}

FAMILY = DecoderFamily(
    name="glm4",
    config_class=Glm4Config,
    config_map=ConfigMap(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_552),
            Setting("mlp", ("intermediate_size",), 13_696),
            Setting("layers", ("num_hidden_layers",), 40),
            Setting("kv_heads", ("num_key_value_heads",), 2, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1.5625e-7),
            Setting("attention_bias", ("attention_bias",), True),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=_NAMES,
    sizes=("9B", "32B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
