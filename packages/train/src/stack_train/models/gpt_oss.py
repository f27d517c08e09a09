"""gpt-oss: attention sinks, sliding windows in every second layer, and experts with biases and clamped activations.

Outputs match transformers' `GptOssForCausalLM`. The published MXFP4 weights are dequantized to bfloat16 when they are
read.

Source: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025 (arXiv:2508.10925).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.models.weight_map import Stored
from stack_train.nn.experts import Experts, Router
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "GptOssConfig"]


@config
class GptOssConfig(ExpertsConfig):
    """Size and numerics of a gpt-oss; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
      window: size of the attention window in tokens, the query included, in the first layer and every second one after.
      expert_limit: limit of the experts' activations: clamps gates from above, and the factors of gates on both sides.
      attention_bias: adds biases to the projections of attention.
    """

    name: Literal["gpt_oss"] = "gpt_oss"
    rope_theta: PositiveFloat = 150_000.0
    norm_epsilon: PositiveFloat = 1e-5
    window: PositiveInt = 128
    expert_limit: PositiveFloat = 7.0
    attention_bias: bool = True


def spec(config: GptOssConfig) -> DecoderSpec:
    """Returns the architecture, with sliding windows in every second layer."""
    bias = config.attention_bias
    experts = Experts(
        router=Router(experts=config.experts, active=config.active_experts),
        width=config.mlp,
        activation="quick_gelu",
        bias=True,
        limit=config.expert_limit,
        up_offset=1.0,
        buffer=config.expert_buffer,
    )

    def layer(number: int) -> Layer:
        window = None if number % 2 else config.window
        attention = config.attention(sinks=True, bias=bias, output_bias=bias, window=window)
        return Layer(attention=attention, feed_forward=experts)

    layers = tuple(map(layer, range(config.layers)))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    reader.expect_layers(periodic(reader.get("num_hidden_layers", default=36), 2))
    reader.expect("experts_per_token", reader.get("num_experts_per_tok", default=4))  # published as a duplicate
    return read_rope(reader, theta=150_000.0)


def _write(config: GptOssConfig) -> dict[str, Any]:
    return {**write_rope(config), "layer_types": periodic(config.layers, 2)}


_EXPERTS = "mlp.experts."

FAMILY = DecoderFamily(
    name="gpt_oss",
    config_class=GptOssConfig,
    config_map=ConfigMap(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        settings=(
            Setting("vocab_size", ("vocab_size",), 201_088),
            Setting("embed", ("hidden_size",), 2880),
            Setting("layers", ("num_hidden_layers",), 36),
            Setting("heads", ("num_attention_heads",), 64),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 64, "head_size"),
            Setting("mlp", ("intermediate_size",), 2880),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",), 128),
            Setting("experts", ("num_local_experts", "num_experts"), 128),
            Setting("active_experts", ("num_experts_per_tok",), 4),
            Setting("expert_limit", ("swiglu_limit",), 7.0),
            Setting("attention_bias", ("attention_bias",), True),
        ),
        fixed={"hidden_act": "silu", "swiglu_alpha": 1.702},
        silent=("initial_context_length",),  # repeats rope_scaling's original_max_position_embeddings
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        "attention/sinks": "self_attn.sinks",
        "feed_forward/router": "mlp.router",
        "feed_forward/expert_gate": Stored(name=_EXPERTS + "gate_up_proj", part=(0, 2), interleaved=True),
        "feed_forward/expert_up": Stored(name=_EXPERTS + "gate_up_proj", part=(1, 2), interleaved=True),
        "feed_forward/expert_gate_bias": Stored(name=_EXPERTS + "gate_up_proj_bias", part=(0, 2), interleaved=True),
        "feed_forward/expert_up_bias": Stored(name=_EXPERTS + "gate_up_proj_bias", part=(1, 2), interleaved=True),
        "feed_forward/expert_down": Stored(name=_EXPERTS + "down_proj"),
        "feed_forward/expert_down_bias": Stored(name=_EXPERTS + "down_proj_bias"),
    },
    sizes=("20b", "120b"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
