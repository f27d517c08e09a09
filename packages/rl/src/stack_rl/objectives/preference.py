"""Objectives on `data.name: preferences`: pairs of a chosen and a rejected answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel
from stack_core.abi.objectives import Objective
from stack_rl.math.preference import accuracy, dpo_loss, dpo_margin, ipo_loss, orpo_loss, simpo_loss
from stack_rl.objectives.answers import answer_logprobs

__all__ = ["Answers", "DPOConfig", "IPOConfig", "ORPOConfig", "PairConfig", "SimPOConfig"]

_ANSWERS: Final = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch answers seq")
_REFERENCE: Final = {"reference_logprobs": "batch answers"}


@dataclass(frozen=True)
class Answers:
    """Inputs of a pair loss; the chosen answer comes first.

    Attributes:
      logprobs: log p(answer), summed over its tokens.
      mean_logprobs: log p(answer) divided by its number of tokens; -1 for padding.
      reference_logprobs: log p_ref(answer) under the frozen reference, summed; 0 for objectives without a reference.
    """

    logprobs: Float[Array, "batch 2"]
    mean_logprobs: Float[Array, "batch 2"]
    reference_logprobs: Float[Array, "batch 2"]


@config
class PairConfig(Objective):
    """The mean of a loss over pairs. An algorithm is a subclass that implements `rewards` and `losses`.

    Attributes:
      name: key of the algorithm in the registry `objectives`.
    """

    name: str

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(_ANSWERS)
    shown_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin")

    def rewards(self, answers: Answers) -> Float[Array, "batch 2"]:
        """Computes the implicit reward of each answer; the difference is the pair's margin."""
        raise NotImplementedError

    def losses(self, answers: Answers) -> Float[Array, " batch"]:
        raise NotImplementedError

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        logprobs = answer_logprobs(model, batch)
        counts = jnp.sum(batch["targets"] != IGNORED_TARGET, axis=-1).astype(logprobs.dtype)
        means = jnp.where(counts > 0, logprobs / jnp.maximum(counts, 1), -1)
        reference = batch["reference_logprobs"] if "reference_logprobs" in self.inputs else jnp.zeros_like(logprobs)
        answers = Answers(logprobs, means, reference)
        # Padding pairs, which fill the last held-out batch, lack targets and get weight 0.
        real = jnp.any(counts > 0, axis=1).astype(logprobs.dtype)
        weight = jnp.sum(real)

        def mean(values: jax.Array) -> Metric:
            return Metric.mean(jnp.sum(values * real) / jnp.maximum(weight, 1.0), weight)

        loss, rewards = mean(self.losses(answers)), self.rewards(answers)
        margin = rewards[:, 0] - rewards[:, 1]
        return loss.value, {
            "loss": loss,
            "margin": mean(margin),
            "accuracy": mean(accuracy(margin)),
            "reward_chosen": mean(rewards[:, 0]),
            "reward_rejected": mean(rewards[:, 1]),
            "logprob_chosen": mean(means[:, 0]),
        }


@config
class DPOConfig(PairConfig):
    """Direct preference optimization: raises the likelihood of chosen answers over the reference, lowers rejected ones.

        l = -log sigmoid(m), m = beta ((log p - log p_ref)(chosen) - (log p - log p_ref)(rejected))

    The reference is the model that the run starts from; the data scores it once, before the first step.

    Attributes:
      name: selects this objective.
      beta: strength of the penalty for leaving the reference.
      label_smoothing: assumed fraction of pairs with a wrong label.

    Source: Rafailov et al., Direct Preference Optimization, 2023 (arXiv:2305.18290), equation 7.
    """

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(_ANSWERS | _REFERENCE)

    def rewards(self, answers: Answers) -> Float[Array, "batch 2"]:
        return self.beta * (answers.logprobs - answers.reference_logprobs)

    def losses(self, answers: Answers) -> Float[Array, " batch"]:
        margin = dpo_margin(answers.logprobs, answers.reference_logprobs, beta=self.beta)
        return dpo_loss(margin, label_smoothing=self.label_smoothing)


@config
class IPOConfig(PairConfig):
    """Identity preference optimization: regresses DPO's margin to a constant, so noise-free labels do not overfit.

        l = (m - 1 / (2 beta))^2, m = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)

    Attributes:
      name: selects this objective.
      beta: the paper's tau; the target margin is 1 / (2 beta).

    Source: Azar et al., A general theoretical paradigm, 2023 (arXiv:2310.12036), equation 17.
    """

    name: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(_ANSWERS | _REFERENCE)

    def rewards(self, answers: Answers) -> Float[Array, "batch 2"]:
        return answers.logprobs - answers.reference_logprobs

    def losses(self, answers: Answers) -> Float[Array, " batch"]:
        margin = dpo_margin(answers.logprobs, answers.reference_logprobs, beta=1.0)
        return ipo_loss(margin, beta=self.beta)


@config
class ORPOConfig(PairConfig):
    """Odds ratio preference optimization: supervised fine-tuning on chosen answers plus a penalty on rejected ones.

        l = -log p(chosen) - weight log sigmoid(log odds(chosen) - log odds(rejected)), log p a mean over tokens

    It needs no reference; set `data.reference: false` to skip scoring one.

    Attributes:
      name: selects this objective.
      weight: weight of the odds-ratio term, the paper's lambda.

    Source: Hong et al., ORPO, 2024 (arXiv:2403.07691), equation 6.
    """

    name: Literal["orpo"] = "orpo"
    weight: NonNegativeFloat = 0.1

    def rewards(self, answers: Answers) -> Float[Array, "batch 2"]:
        return answers.mean_logprobs

    def losses(self, answers: Answers) -> Float[Array, " batch"]:
        return orpo_loss(answers.mean_logprobs, weight=self.weight)


@config
class SimPOConfig(PairConfig):
    """Simple preference optimization: uses the mean log-probability per token as the reward, without a reference.

        l = -log sigmoid(beta (log p(chosen) - log p(rejected)) - gamma), log p a mean over tokens

    Set `data.reference: false` to skip scoring a reference.

    Attributes:
      name: selects this objective.
      beta: scale of the reward.
      gamma: target difference of the two rewards.

    Source: Meng et al., SimPO, 2024 (arXiv:2405.14734), equation 6.
    """

    name: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    gamma: NonNegativeFloat = 1.0

    def rewards(self, answers: Answers) -> Float[Array, "batch 2"]:
        return self.beta * answers.mean_logprobs

    def losses(self, answers: Answers) -> Float[Array, " batch"]:
        return simpo_loss(answers.mean_logprobs, beta=self.beta, gamma=self.gamma)
