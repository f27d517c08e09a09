"""Settings and tensor names of decoders with grouped and shared experts, which several families share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.weight_map import Names
from stack_train.nn.attention import Mixer
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["BALANCED_NAMES", "EXPERT_NAMES", "REPEATED", "BalancedConfig", "GroupedExpertsConfig"]


@config
class GroupedExpertsConfig(ExpertsConfig):
    """Settings of a decoder with grouped and shared experts; inherits the fields of `ExpertsConfig`.

    Attributes:
      mlp: hidden width of the dense feed-forward layers.
      dense_layers: number of first layers with dense feed-forward layers.
      expert_mlp: hidden width of an expert.
      shared_experts: number of shared experts, which are applied to every token.
      expert_groups: number of groups that the experts are divided into.
      kept_groups: number of groups from which a token's experts are chosen.
      expert_scale: factor of the experts' weights.
    """

    dense_layers: NonNegativeInt = 1
    expert_mlp: PositiveInt = 512
    shared_experts: NonNegativeInt = 1
    expert_groups: PositiveInt = 1
    kept_groups: PositiveInt = 1
    expert_scale: PositiveFloat = 1.0

    @property
    def group_best(self) -> int:
        """Number of a group's best experts whose scores add up to the group's score."""
        return 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts % self.expert_groups or self.kept_groups > self.expert_groups:
            raise ConfigError(
                f"expert_groups={self.expert_groups} has to divide experts={self.experts} and be at least "
                f"kept_groups={self.kept_groups}; change one of them."
            )
        size = self.experts // self.expert_groups
        if self.expert_groups > 1 and (size < self.group_best or self.kept_groups * size < self.active_experts):
            raise ConfigError(
                f"experts={self.experts} in expert_groups={self.expert_groups} hold {size} each; a group is scored "
                f"by its {self.group_best} best experts, and kept_groups={self.kept_groups} must hold at least "
                f"active_experts={self.active_experts} experts. Lower expert_groups, or raise kept_groups."
            )

    def mixture(self, **fields: Any) -> Experts:
        """Returns the mixture of experts; `fields` sets further fields of `Router`."""
        router = Router(
            experts=self.experts,
            active=self.active_experts,
            scale=self.expert_scale,
            groups=self.expert_groups,
            kept_groups=self.kept_groups,
            group_best=self.group_best,
            **fields,
        )
        shared = self.shared_experts * self.expert_mlp
        return Experts(router=router, width=self.expert_mlp, shared=shared, buffer=self.expert_buffer)

    def decoder(self, attention: Mixer, sparse: Experts, mtp_layers: int = 0) -> DecoderSpec:
        """Returns the architecture with the same attention in all layers and dense first layers."""
        dense = Gated(width=self.mlp)
        kinds = [dense if layer < self.dense_layers else sparse for layer in range(self.layers)]
        layers = tuple(Layer(attention=attention, feed_forward=kind) for kind in kinds)
        further = (Layer(attention=attention, feed_forward=sparse),) * mtp_layers
        return DecoderSpec(layers=layers, norm=Norm(epsilon=self.norm_epsilon), further=further)


@config
class BalancedConfig(GroupedExpertsConfig):
    """Settings of sigmoid-scored experts with selection biases; inherits the fields of `GroupedExpertsConfig`.

    Attributes:
      normalized: divides the weights of a token's experts by their sum.
      bias_rate: change of the experts' selection biases per step, which balances their load.
      mtp_layers: number of multi-token prediction layers, each of which predicts one token further ahead.
    """

    normalized: bool = True
    bias_rate: NonNegativeFloat = 0.001
    mtp_layers: NonNegativeInt = 0

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"further_layers": "model.mtp_layers"})

    def balanced(self, attention: Mixer) -> DecoderSpec:
        """Returns the architecture with this attention."""
        sparse = self.mixture(score="sigmoid", normalized=self.normalized, bias_rate=self.bias_rate)
        return self.decoder(attention, sparse, self.mtp_layers)


_SHARED = "mlp.shared_experts."
EXPERT_NAMES: Names = {f"feed_forward/shared/{name}": f"{_SHARED}{name}_proj" for name in ("gate", "up", "down")}
"""Tensor names of shared experts."""

BALANCED_NAMES: Names = {
    **EXPERT_NAMES,
    "feed_forward/selection_bias": "mlp.gate.e_score_correction_bias",
    "further/embedding_norm": "enorm.weight",
    "further/hidden_norm": "hnorm.weight",
    "further/project": "eh_proj",
    "further/norm": "shared_head.norm.weight",
}
"""Tensor names of the experts and of the multi-token prediction layers of a `BalancedConfig`."""

REPEATED: Mapping[str, str | None] = {
    "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
}
"""Tensors of multi-token prediction layers that repeat others."""
