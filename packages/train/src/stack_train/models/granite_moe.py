"""Granite MoE: a Granite 3 whose feed-forward layers are mixtures of experts.

Outputs match transformers' `GraniteMoeForCausalLM`.

Source: Granite Team, Granite 3.0 Language Models, 2024.
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.granite import GRANITE_SETTINGS, ScaledConfig, scaled_spec
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Setting
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.experts import Experts, Router

__all__ = ["FAMILY", "GRANITE_EXPERTS", "GraniteMoeConfig", "fused_in_granite"]


@config
class GraniteMoeConfig(ScaledConfig, ExpertsConfig):
    """Size and numerics of a Granite MoE; inherits the fields of `ScaledConfig` and `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
    """

    name: Literal["granite_moe"] = "granite_moe"


def spec(config: GraniteMoeConfig) -> DecoderSpec:
    router = Router(experts=config.experts, active=config.active_experts)
    return scaled_spec(config, Experts(router=router, width=config.mlp, buffer=config.expert_buffer))


def fused_in_granite(name: str, part: tuple[int, int]) -> Stored:
    """Returns the place of a matrix in a tensor of joined matrices, [..., d_out, d_in]."""
    return Stored(name=f"{name}.weight", transposed=True, part=part, part_axis=-2)


GRANITE_EXPERTS: Names = {
    "feed_forward/router": "block_sparse_moe.router.layer",
    "feed_forward/expert_gate": fused_in_granite("block_sparse_moe.input_linear", (0, 2)),
    "feed_forward/expert_up": fused_in_granite("block_sparse_moe.input_linear", (1, 2)),
    "feed_forward/expert_down": fused_in_granite("block_sparse_moe.output_linear", (0, 1)),
}
"""Tensor names of a mixture of experts."""


FAMILY = DecoderFamily(
    name="granite_moe",
    config_class=GraniteMoeConfig,
    config_map=ConfigMap(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        settings=(
            *GRANITE_SETTINGS,
            Setting("experts", ("num_local_experts", "num_experts"), 8),
            Setting("active_experts", ("num_experts_per_tok",), 2),
        ),
        fixed={"hidden_act": "silu", "position_embedding_type": "rope"},
    ),
    spec=spec,
    names=GRANITE_EXPERTS,
    sizes=("1B-A400M", "3B-A800M"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
