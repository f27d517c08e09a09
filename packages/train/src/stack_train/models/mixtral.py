"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts.

Outputs match transformers' `MixtralForCausalLM`.

Source: Jiang et al., Mixtral of Experts, 2024 (arXiv:2401.04088).
"""

from functools import partial
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Setting, read_rope
from stack_train.models.weight_map import Names
from stack_train.nn.experts import Experts, Router
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "MIXTRAL_NAMES", "ExpertsConfig", "MixtralConfig"]


@config
class ExpertsConfig(DecoderConfig):
    """Settings of a decoder with mixtures of experts; inherits the fields of `DecoderConfig`.

    Attributes:
      experts: number of experts per mixture.
      active_experts: number of experts per token.
      expert_buffer: capacity of each device's receive buffer relative to the rows it sends. Excess rows are dropped;
        None drops none.
    """

    experts: PositiveInt = 8
    active_experts: PositiveInt = 2
    expert_buffer: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.experts < self.active_experts:
            raise ConfigError(
                f"active_experts={self.active_experts} is more than experts={self.experts}; change one of them."
            )


@config
class MixtralConfig(ExpertsConfig):
    """Size and numerics of a Mixtral; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
      window: size of the attention window in tokens, the query included; None attends to all tokens.
    """

    name: Literal["mixtral"] = "mixtral"
    window: PositiveInt | None = None


def spec(config: MixtralConfig) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    experts = Experts(
        router=Router(experts=config.experts, active=config.active_experts),
        width=config.mlp,
        buffer=config.expert_buffer,
    )
    layer = Layer(attention=config.attention(window=config.window), feed_forward=experts)
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


MIXTRAL_NAMES: Names = {
    "feed_forward/router": "block_sparse_moe.gate",
    "feed_forward/expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "feed_forward/expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
    "feed_forward/expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
}
"""Tensor names of the mixtures."""

FAMILY = DecoderFamily(
    name="mixtral",
    config_class=MixtralConfig,
    config_map=ConfigMap(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        settings=(
            Setting("mlp", ("intermediate_size",), 14_336),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",)),
            Setting("experts", ("num_local_experts", "num_experts"), 8),
            Setting("active_experts", ("num_experts_per_tok",), 2),
        ),
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        read_others=partial(read_rope, theta=1_000_000.0),
    ),
    spec=spec,
    names=MIXTRAL_NAMES,
    sizes=("8x7B", "8x22B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
