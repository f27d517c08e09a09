"""Proximal policy optimization: a critic credits each token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.metrics import Metrics
from stack_core.abi.models import LanguageModel, Outputs
from stack_core.abi.training import Objective
from stack_rl.math.value import value_loss
from stack_rl.objectives.heads import scalar_head
from stack_rl.objectives.policy import OF_DATA, PolicyConfig, PolicyObjective
from stack_rl.objectives.presets import ClippedConfig

__all__ = ["CriticObjective", "PPOConfig", "ScoredCriticObjective"]


@config
class PPOConfig(ClippedConfig):
    """Proximal policy optimization: a critic says what was expected before each token, and is trained along.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + value_weight max((V - R)^2, (V_clipped - R)^2) / 2

    Where A < 0, the first part is at most -dual_clip A. A is that of generalized advantage estimation over the tokens
    that the policy drew (`data.discount`, `data.decay`), whitened; R = A + V_old before that. The critic is a head on
    the policy's hidden states, the further trained model `critic`: `optimizer.groups: {critic: {rate_factor: 10}}`.

    Attributes:
      value_weight: of the critic's loss, whose gradient reaches the body, too.
      value_clip: how far V may move from V_old before its token stops to learn; None does not clip.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), equations 7 and 9. Departures: (1)
    the clipped value loss, as in OpenAI's baselines; (2) the dual clip of Ye et al., 2019 (arXiv:1912.09729); (3) one
    update a batch.
    """

    name: Literal["ppo"] = "ppo"
    dual_clip: float | None = Field(default=3.0, gt=1.0)
    value_weight: NonNegativeFloat = 0.5
    value_clip: PositiveFloat | None = 0.2

    advantage: ClassVar[str] = "gae"
    weights: ClassVar[str] = "token"
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**PolicyConfig.inputs, "old_values": "batch seq", "returns": "batch seq"}
    )

    def value_losses(
        self,
        values: Float[Array, "batch seq"],
        old_values: Float[Array, "batch seq"],
        returns: Float[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        return self.value_weight * value_loss(values, old_values, returns, clip=self.value_clip)

    def build(self) -> Objective:
        return ScoredCriticObjective(self) if self.kl and self.reference == OF_DATA else CriticObjective(self)


@dataclass(frozen=True)
class CriticObjective(PolicyObjective):
    """The objective of a `PolicyConfig` with a critic, and with a reference where the config has a divergence."""

    inputs: ClassVar[Mapping[str, str]] = PPOConfig.inputs
    trained_models: ClassVar[Mapping[str, Callable[..., Any]]] = MappingProxyType({"critic": scalar_head})

    @property
    def companions(self) -> Mapping[str, str]:
        asked = self.config.kl and self.config.reference != OF_DATA
        return {"reference": self.config.reference} if asked else {}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # nothing is drawn
        return self._loss(model, batch, companions.get("reference"), companions["critic"])

    def scores(self, outputs: Outputs, batch: Mapping[str, jax.Array], **models: Any) -> Mapping[str, jax.Array]:
        """What the critic expects before each target."""
        return {"values": models["critic"](outputs.hidden)}


@dataclass(frozen=True)
class ScoredCriticObjective(CriticObjective):
    """That of a `PolicyConfig` with a critic whose reference has scored the batch before."""

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType({**PPOConfig.inputs, "reference_logprobs": "batch seq"})
