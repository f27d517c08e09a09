"""DeepSeek-V3: latent attention, grouped and shared experts, and dense first layers.

Outputs match transformers' `DeepseekV3ForCausalLM`. Training adds multi-token prediction layers that match its
`MtpModel`.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437).
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.grouped_experts import BALANCED_NAMES, REPEATED, BalancedConfig
from stack_train.models.latent_config import LATENT_NAMES, LATENT_SETTINGS, LatentConfig, read_latent, write_latent
from stack_train.models.reader import ConfigMap, Setting

__all__ = ["FAMILY", "DeepseekV3Config"]


@config
class DeepseekV3Config(LatentConfig, BalancedConfig):
    """Size and numerics of a DeepSeek-V3; inherits the fields of `LatentConfig` and `BalancedConfig`.

    Attributes:
      name: selects this family.
      rope_interleaved: rotates adjacent features as pairs, instead of features half of `rope_dim` apart.
    """

    name: Literal["deepseek_v3"] = "deepseek_v3"
    rope_interleaved: bool = True


def spec(config: DeepseekV3Config) -> DecoderSpec:
    return config.balanced(config.latent_attention(interleaved=config.rope_interleaved))


FAMILY = DecoderFamily(
    name="deepseek_v3",
    config_class=DeepseekV3Config,
    config_map=ConfigMap(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 129_280),
            Setting("embed", ("hidden_size",), 7168),
            Setting("layers", ("num_hidden_layers",), 61),
            Setting("heads", ("num_attention_heads",), 128),
            Setting("mlp", ("intermediate_size",), 18_432),
            Setting("max_positions", ("max_position_embeddings",), 4096),
            *LATENT_SETTINGS,
            Setting("rope_interleaved", ("rope_interleave",), True),
            Setting("dense_layers", ("first_k_dense_replace",), 3),
            Setting("experts", ("n_routed_experts", "num_local_experts", "num_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 8),
            Setting("expert_mlp", ("moe_intermediate_size",), 2048),
            Setting("shared_experts", ("n_shared_experts",), 1),
            Setting("expert_groups", ("n_group",), 8),
            Setting("kept_groups", ("topk_group",), 4),
            Setting("normalized", ("norm_topk_prob",), True),
            Setting("expert_scale", ("routed_scaling_factor",), 2.5),
            Setting("mtp_layers", ("num_nextn_predict_layers", "num_mtp_layers"), 1),
        ),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "pretraining_tp": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        read_others=read_latent,
        write_others=write_latent,
    ),
    spec=spec,
    names={**LATENT_NAMES, **BALANCED_NAMES},
    redundant=REPEATED,
    sizes=("671B", "Kimi K2 1T"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
