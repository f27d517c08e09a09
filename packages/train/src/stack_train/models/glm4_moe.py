"""GLM-4.5, 4.6 and 4.7: grouped-query attention with partial rotary positions, and the experts of DeepSeek-V3.

Outputs match transformers' `Glm4MoeForCausalLM`. Training adds multi-token prediction layers.

Source: GLM-4.5 Team, GLM-4.5, 2025 (arXiv:2508.06471).
"""

from typing import Any, Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.grouped_experts import BALANCED_NAMES, REPEATED, BalancedConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.nn.attention import Rope

__all__ = ["FAMILY", "Glm4MoeConfig"]


@config
class Glm4MoeConfig(BalancedConfig):
    """Size and numerics of a GLM-4.5; inherits the fields of `BalancedConfig`.

    Attributes:
      name: selects this family.
      rotary_share: fraction of a head's features with rotary positions.
      attention_bias: adds biases to queries, keys and values.
      head_norms: applies an RMS norm to each head of queries and keys.
    """

    name: Literal["glm4_moe"] = "glm4_moe"
    norm_epsilon: PositiveFloat = 1e-5
    rotary_share: PositiveFloat = 0.5
    attention_bias: bool = False
    head_norms: bool = False


def spec(config: Glm4MoeConfig) -> DecoderSpec:
    rotary_dim = int(config.head_size * config.rotary_share)
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=rotary_dim)
    return config.balanced(config.attention(bias=config.attention_bias, head_norms=config.head_norms, rope=rope))


def _read(reader: Reader) -> dict[str, Any]:
    rope = read_rope(reader, handled=("partial_rotary_factor",))
    return {**rope, "rotary_share": read_rotary_share(reader, 0.5)}


def _write(config: Glm4MoeConfig) -> dict[str, Any]:
    return {**write_rope(config), "partial_rotary_factor": config.rotary_share}


FAMILY = DecoderFamily(
    name="glm4_moe",
    config_class=Glm4MoeConfig,
    config_map=ConfigMap(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_552),
            Setting("layers", ("num_hidden_layers",), 46),
            Setting("heads", ("num_attention_heads",), 96),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 10_944),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("dense_layers", ("first_k_dense_replace",), 1),
            Setting("experts", ("n_routed_experts", "num_local_experts", "num_experts"), 128),
            Setting("active_experts", ("num_experts_per_tok",), 8),
            Setting("expert_mlp", ("moe_intermediate_size",), 1408),
            Setting("shared_experts", ("n_shared_experts",), 1),
            Setting("expert_groups", ("n_group",), 1),
            Setting("kept_groups", ("topk_group",), 1),
            Setting("normalized", ("norm_topk_prob",), True),
            Setting("expert_scale", ("routed_scaling_factor",), 1.0),
            Setting("mtp_layers", ("num_nextn_predict_layers", "num_mtp_layers"), 1),
            Setting("attention_bias", ("attention_bias",), False),
            Setting("head_norms", ("use_qk_norm",), False),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=BALANCED_NAMES,
    redundant=REPEATED,
    sizes=("106B-A12B", "355B-A32B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
