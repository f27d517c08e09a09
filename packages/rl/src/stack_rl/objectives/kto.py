"""Kahneman-Tversky optimization (KTO), on `data.name: judged`: single answers labelled good or bad."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel
from stack_core.abi.objectives import Objective
from stack_rl.math.preference import kto_baseline, kto_loss
from stack_rl.objectives.answers import answer_logprobs

__all__ = ["KTOConfig"]


@config
class KTOConfig(Objective):
    """Kahneman-Tversky optimization: makes good answers likelier than under the reference, bad ones less likely.

        l = d (1 - sigmoid(beta (h - z))) if desirable, else u (1 - sigmoid(beta (z - h))), h = log p - log p_ref

    z = max(0, mean of log p - log p_ref over answers to other prompts), over the batch or each microbatch, without a
    gradient. The reference is the model that the run starts from; the data scores it once, before training.

    Attributes:
      name: selects this objective.
      beta: strength of the penalty for leaving the reference.
      desirable_weight, undesirable_weight: d and u. The paper keeps d n_d / (u n_u) between 1 and 4/3, with n_d and n_u
        the numbers of good and bad answers.

    Source: Ethayarajh et al., KTO, 2024 (arXiv:2402.01306), section 4.1.
    """

    name: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0

    shown_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch answers seq"),
            "reference_logprobs": "batch answers",
            "desirable": "batch",
        }
    )

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        logprobs = answer_logprobs(model, batch)
        ratios = logprobs - batch["reference_logprobs"].astype(logprobs.dtype)
        # Padding rows, which fill the last held-out batch, lack targets and get weight 0.
        real = jnp.any(batch["targets"][:, 0] != IGNORED_TARGET, axis=-1).astype(ratios.dtype)
        desirable = batch["desirable"] > 0
        baseline = kto_baseline(ratios[:, 1], real)
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        losses = kto_loss(ratios[:, 0], desirable, baseline, beta=self.beta, **weights)
        gains = self.beta * (ratios[:, 0] - baseline)
        right = jnp.where(desirable, gains > 0, gains < 0).astype(ratios.dtype)

        def mean(values: jax.Array, weights: jax.Array = real) -> Metric:
            weight = jnp.sum(weights)
            return Metric.mean(jnp.sum(values * weights) / jnp.maximum(weight, 1.0), weight)

        loss = mean(losses)
        return loss.value, {
            "loss": loss,
            "accuracy": mean(right),
            "baseline": Metric.mean(baseline, jnp.sum(real)),
            "reward_desirable": mean(self.beta * ratios[:, 0], real * desirable.astype(real.dtype)),
            "reward_undesirable": mean(self.beta * ratios[:, 0], real * (~desirable).astype(real.dtype)),
        }
