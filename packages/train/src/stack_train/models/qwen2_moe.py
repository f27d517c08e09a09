"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 whose feed-forward layers are mixtures with a gated shared expert.

Outputs match transformers' `Qwen2MoeForCausalLM`.

Source: Qwen Team, Qwen1.5-MoE, 2024; Qwen2 Technical Report, 2024 (arXiv:2407.10671).
"""

from typing import Any, Literal

from pydantic import NonNegativeInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen3_moe import QWEN_EXPERTS, SHARED_NAMES, SparseConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Qwen2MoeConfig"]


@config
class Qwen2MoeConfig(SparseConfig):
    """Size and numerics of a Qwen2-MoE; inherits the fields of `SparseConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to queries, keys and values.
      shared_mlp: hidden width of the shared expert, which is applied to every token; 0 omits the shared expert.
    """

    name: Literal["qwen2_moe"] = "qwen2_moe"
    attention_bias: bool = True
    shared_mlp: NonNegativeInt = 512


def spec(config: Qwen2MoeConfig) -> DecoderSpec:
    """Returns the architecture, with the same attention in all layers."""
    attention = config.attention(bias=config.attention_bias)
    shared: dict[str, Any] = {"shared": config.shared_mlp, "shared_gate": config.shared_mlp > 0}
    layers = [Layer(attention=attention, feed_forward=config.feed_forward(n, **shared)) for n in range(config.layers)]
    return DecoderSpec(layers=tuple(layers), norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    reader.get("sliding_window", "max_window_layers")  # ignored: transformers reads them with use_sliding_window only
    reader.expect_layers(["full_attention"] * reader.get("num_hidden_layers", default=24))
    return read_rope(reader)


FAMILY = DecoderFamily(
    name="qwen2_moe",
    config_class=Qwen2MoeConfig,
    config_map=ConfigMap(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_936),
            Setting("embed", ("hidden_size",), 2048),
            Setting("layers", ("num_hidden_layers",), 24),
            Setting("heads", ("num_attention_heads",), 16),
            Setting("kv_heads", ("num_key_value_heads",), 16, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 5632),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
            *QWEN_EXPERTS,
            Setting("experts", ("num_experts", "num_local_experts", "n_routed_experts"), 60),
            Setting("active_experts", ("num_experts_per_tok",), 4),
            Setting("expert_mlp", ("moe_intermediate_size",), 1408),
            Setting("shared_mlp", ("shared_expert_intermediate_size",), 5632),
            Setting("attention_bias", ("qkv_bias",), True),
        ),
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        read_others=_read,
    ),
    spec=spec,
    names=SHARED_NAMES,
    sizes=("A2.7B", "57B-A14B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
