"""Qwen3-VL with mixtures of experts instead of the decoder's feed-forward layers.

Outputs match transformers' `Qwen3VLMoeForConditionalGeneration` on texts and images.

Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.qwen3_moe import SparseConfig
from stack_train.models.qwen3_vl import Qwen3VLSettings, vision_family
from stack_train.models.reader import Setting
from stack_train.models.weight_map import Names, Stored

__all__ = ["FAMILY", "Qwen3VLMoeConfig"]


@config
class Qwen3VLMoeConfig(SparseConfig, Qwen3VLSettings):
    """Size and numerics of a Qwen3-VL-MoE; inherits the fields of `SparseConfig` and `Qwen3VLSettings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen3_vl_moe"] = "qwen3_vl_moe"


# Published tensors hold all experts of a layer, [experts, d_in, d_out].
_NAMES: Names = {
    "feed_forward/expert_gate": Stored(name="mlp.experts.gate_up_proj", part=(0, 2)),
    "feed_forward/expert_up": Stored(name="mlp.experts.gate_up_proj", part=(1, 2)),
    "feed_forward/expert_down": Stored(name="mlp.experts.down_proj"),
}

FAMILY = vision_family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    Qwen3VLMoeConfig,
    (
        Setting("embed", ("hidden_size",), 2048),
        Setting("layers", ("num_hidden_layers",), 24),
        Setting("heads", ("num_attention_heads",), 16),
        Setting("kv_heads", ("num_key_value_heads",), 16, "kv_head_count"),
        Setting("mlp", ("intermediate_size",), 5632),
        Setting("experts", ("num_experts", "num_local_experts"), 60),
        Setting("active_experts", ("num_experts_per_tok",), 4),
        Setting("expert_mlp", ("moe_intermediate_size",), 1408),
        Setting("sparse_step", ("decoder_sparse_step",), 1),
        Setting("dense_layers", ("mlp_only_layers",), ()),
    ),
    # transformers always divides by the sum of the weights, whatever this key says.
    fixed={"norm_topk_prob": True},
    names=_NAMES,
    sizes=("30B-A3B", "235B-A22B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
