"""Qwen3: a Llama with per-head norms of queries and keys, and optional sliding windows in later layers.

Outputs match transformers' `Qwen3ForCausalLM`.

Source: Qwen Team, Qwen3 Technical Report, 2025 (arXiv:2505.09388).
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen2 import WindowedConfig, read_windows, write_windows
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Qwen3Config"]


@config
class Qwen3Config(WindowedConfig):
    """Size and numerics of a Qwen3; inherits the fields of `WindowedConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to the projections of attention.
    """

    name: Literal["qwen3"] = "qwen3"
    attention_bias: bool = False


def spec(config: Qwen3Config) -> DecoderSpec:
    bias = config.attention_bias

    def layer(number: int) -> Layer:
        window = config.window_of(number)
        attention = config.attention(head_norms=True, bias=bias, output_bias=bias, window=window)
        return Layer(attention=attention, feed_forward=Gated(width=config.mlp))

    return DecoderSpec(layers=tuple(map(layer, range(config.layers))), norm=Norm(epsilon=config.norm_epsilon))


FAMILY = DecoderFamily(
    name="qwen3",
    config_class=Qwen3Config,
    config_map=ConfigMap(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        settings=(
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 22_016),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
            Setting("attention_bias", ("attention_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
        read_others=read_windows,
        write_others=write_windows,
    ),
    spec=spec,
    sizes=("0.6B", "1.7B", "4B", "8B", "14B", "32B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
