"""DeepSeek-V2: latent attention, shared experts, softmax-scored experts in groups, and dense first layers.

Outputs match transformers' `DeepseekV2ForCausalLM`.

Source: DeepSeek-AI, DeepSeek-V2, 2024 (arXiv:2405.04434).
"""

from typing import Any, Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.grouped_experts import EXPERT_NAMES, GroupedExpertsConfig
from stack_train.models.latent_config import LATENT_NAMES, LATENT_SETTINGS, LatentConfig, read_latent, write_latent
from stack_train.models.reader import ConfigMap, Reader, Setting

__all__ = ["FAMILY", "DeepseekV2Config"]


@config
class DeepseekV2Config(LatentConfig, GroupedExpertsConfig):
    """Size and numerics of a DeepSeek-V2; inherits the fields of `LatentConfig` and `GroupedExpertsConfig`.

    Attributes:
      name: selects this family.
    """

    name: Literal["deepseek_v2"] = "deepseek_v2"

    @property
    def group_best(self) -> int:
        return 1


def spec(config: DeepseekV2Config) -> DecoderSpec:
    return config.decoder(config.latent_attention(interleaved=True), config.mixture(normalized=False))


def _read(reader: Reader) -> dict[str, Any]:
    method = reader.get("topk_method", default="greedy")
    groups, kept = reader.get("n_group", default=1) or 1, reader.get("topk_group", default=1) or 1
    if method not in ("greedy", "group_limited_greedy"):
        reader.problems.append(f"topk_method={method!r}, not 'greedy' or 'group_limited_greedy'")
    # The method "greedy" ignores the groups.
    chosen = {"expert_groups": groups, "kept_groups": kept} if method == "group_limited_greedy" else {}
    return {"expert_groups": 1, "kept_groups": 1, **chosen, **read_latent(reader)}


def _write(config: DeepseekV2Config) -> dict[str, Any]:
    return {
        **write_latent(config),
        "topk_method": "greedy" if config.expert_groups == 1 else "group_limited_greedy",
        "n_group": config.expert_groups,
        "topk_group": config.kept_groups,
    }


FAMILY = DecoderFamily(
    name="deepseek_v2",
    config_class=DeepseekV2Config,
    config_map=ConfigMap(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        settings=(
            Setting("vocab_size", ("vocab_size",), 102_400),
            *LATENT_SETTINGS,
            Setting("dense_layers", ("first_k_dense_replace",), 0),
            Setting("experts", ("n_routed_experts", "num_local_experts", "num_experts"), 64),
            Setting("active_experts", ("num_experts_per_tok",)),
            Setting("expert_mlp", ("moe_intermediate_size",), 1407),
            Setting("shared_experts", ("n_shared_experts",), 2),
            Setting("expert_scale", ("routed_scaling_factor",), 1.0),
        ),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "pretraining_tp": 1,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
        },
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={**LATENT_NAMES, **EXPERT_NAMES},
    sizes=("16B-A2.4B", "236B-A21B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
