"""Qwen3.5 with mixtures of experts: the layers of Qwen3.5 with the mixtures of Qwen3-Next.

Outputs match transformers' `Qwen3_5MoeForCausalLM`. Training adds a multi-token prediction layer for the token after
the next one.

Source: Qwen Team, Qwen3.5, 2026; the layers are of Qwen3-Next.
"""

from functools import partial
from typing import Literal

from pydantic import NonNegativeInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.qwen3_5 import QWEN35_FIXED, QWEN35_NAMES, QWEN35_SILENT, read_qwen35
from stack_train.models.qwen3_moe import SHARED_NAMES
from stack_train.models.qwen3_next import DELTA_SETTINGS, DeltaConfig, delta_spec, write_delta
from stack_train.models.reader import ConfigMap, Setting
from stack_train.nn.experts import Experts, Router

__all__ = ["FAMILY", "Qwen35MoeConfig"]


@config
class Qwen35MoeConfig(DeltaConfig, ExpertsConfig):
    """Size and numerics of a Qwen3.5-MoE; inherits the fields of `DeltaConfig` and `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
      shared_mlp: hidden width of the shared expert, which is applied to every token; 0 omits the shared expert.
    """

    name: Literal["qwen3_5_moe"] = "qwen3_5_moe"
    shared_mlp: NonNegativeInt = 512


def spec(config: Qwen35MoeConfig) -> DecoderSpec:
    experts = Experts(
        router=Router(experts=config.experts, active=config.active_experts),
        width=config.mlp,
        shared=config.shared_mlp,
        shared_gate=config.shared_mlp > 0,
        buffer=config.expert_buffer,
    )
    return delta_spec(config, lambda layer: experts, separate=True)


FAMILY = DecoderFamily(
    name="qwen3_5_moe",
    config_class=Qwen35MoeConfig,
    config_map=ConfigMap(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 248_320),
            Setting("embed", ("hidden_size",), 2048),
            Setting("layers", ("num_hidden_layers",), 40),
            Setting("kv_heads", ("num_key_value_heads",), 2, "kv_head_count"),
            Setting("mlp", ("moe_intermediate_size",), 512),
            *DELTA_SETTINGS,
            Setting("experts", ("num_experts", "num_local_experts", "n_routed_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 8),
            Setting("shared_mlp", ("shared_expert_intermediate_size",), 512),
        ),
        fixed={**QWEN35_FIXED, "norm_topk_prob": True},
        silent=(*QWEN35_SILENT, "intermediate_size"),  # no layer is dense
        read_others=partial(read_qwen35, layers=40),
        write_others=write_delta,
    ),
    spec=spec,
    names={**QWEN35_NAMES, **SHARED_NAMES},
    further_prefix="mtp.layers.{layer}.",
    published_in=("Qwen3_5MoeForConditionalGeneration",),
    sizes=("35B-A3B", "122B-A10B", "397B-A17B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
