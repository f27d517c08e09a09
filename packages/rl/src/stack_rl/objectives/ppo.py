"""Proximal policy optimization (PPO), with a critic for token-level advantages."""

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
from stack_core.abi.objectives import Objective
from stack_rl.math.value import value_loss
from stack_rl.objectives.heads import scalar_head
from stack_rl.objectives.policy import OF_DATA, PolicyConfig, PolicyObjective
from stack_rl.objectives.presets import ClippedConfig

__all__ = ["CriticObjective", "PPOConfig", "ScoredCriticObjective"]


@config
class PPOConfig(ClippedConfig):
    """Proximal policy optimization with a critic that estimates the expected return before each token.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + value_weight max((V - R)^2, (V_clipped - R)^2) / 2

    For A < 0, the first term is at most -dual_clip A. A is the generalized advantage estimate over the sampled tokens
    (`data.discount`, `data.decay`), whitened; R = A + V_old uses A before whitening. The critic is a head on the
    policy's hidden states, the auxiliary model `critic`: `optimizer.groups: {critic: {rate_factor: 10}}`.

    Attributes:
      name: selects this objective.
      dual_clip: bound of the loss for tokens with A < 0, as a multiple of -A; None does not bound it.
      value_weight: weight of the critic's loss, whose gradient also reaches the body.
      value_clip: distance that V may move from V_old towards R before its token stops learning; None does not clip.

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
    """The objective of a `PolicyConfig` with a critic, and with a reference model if the config has a KL term."""

    inputs: ClassVar[Mapping[str, str]] = PPOConfig.inputs

    @property
    def auxiliary_models(self) -> Mapping[str, str | Callable[..., Any]]:
        needs_reference = self.config.kl and self.config.reference != OF_DATA
        reference = {"reference": self.config.reference} if needs_reference else {}
        return {**reference, "critic": scalar_head}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        return self._loss(model, batch, auxiliary.get("reference"), auxiliary["critic"])

    def scores(self, outputs: Outputs, batch: Mapping[str, jax.Array], **auxiliary: Any) -> Mapping[str, jax.Array]:
        """Computes the critic's value before each target."""
        return {"values": auxiliary["critic"](outputs.hidden)}


@dataclass(frozen=True)
class ScoredCriticObjective(CriticObjective):
    """The objective of a `PolicyConfig` with a critic and reference log-probabilities in the batch."""

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType({**PPOConfig.inputs, "reference_logprobs": "batch seq"})
