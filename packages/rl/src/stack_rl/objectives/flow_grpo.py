"""`objective.name: flow_grpo`: rewards of images that a flow samples, on `data.name: image_rollouts`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_rl.math.advantages import group_normalized
from stack_rl.math.flow import step_kl, step_logprob, step_mean
from stack_rl.math.policy import MOST_LOG_RATIO, clipped_loss, is_clipped
from stack_rl.objectives.denoising import DENOISING, check_denoising, check_reference, condition_of

__all__ = ["FlowGRPOConfig"]

_IMAGES = "batch *frames height width channels"
_INPUTS = {
    "images": _IMAGES,
    "next_images": _IMAGES,
    "velocities": _IMAGES,
    "timesteps": "batch",
    "coefficients": "batch coefficient",
    "advantages": "batch",
    "rewards": "batch",
    "weights": "batch",
}


@config
class FlowGRPOConfig(Objective):
    """Flow-GRPO: makes the steps that lead to images of high reward more likely, for a flow sampled by an SDE.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl KL(p || p_ref), log r = log p - log p_old

    p = N(a x + b v(x, t), s^2) is the distribution of the next image x' in one step of sampling, p_old the distribution
    that x' was sampled from, and A = (reward - mean of the group) / std of the group. A row of a batch is one step of
    one image. Log p and KL are means over the values of an image.

    Attributes:
      denoising: objective that the start was trained by, `flow_matching` with the same `shift`.
      name: selects this objective.
      clip_low, clip_high: distance that a ratio may move below and above 1, in the direction of A, before its step
        stops learning.
      max_advantage: bound of |A|.
      kl: weight of the KL divergence from the reference; 0 needs no reference.
      minibatches: number of updates per batch of images; each has an equal part of the images.
      reference: frozen reference, "init", the model at the start of the run, or "run:DIRECTORY".

    Source: Liu et al., Flow-GRPO: training flow matching models via online RL, 2025 (arXiv:2505.05470), equations 5 to
    13. Departures: (1) means over an image in log p and KL, two updates, the clip range and `max_advantage` are of the
    authors' code, not the paper. (2) The last step adds no noise and is not trained.
    """

    denoising: Annotated[Any, Selected(DENOISING)]
    name: Literal["flow_grpo"] = "flow_grpo"
    clip_low: PositiveFloat = 1e-4
    clip_high: PositiveFloat = 1e-4
    max_advantage: PositiveFloat = 5.0
    kl: NonNegativeFloat = 0.04
    minibatches: PositiveInt = 2
    reference: str = "init"

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(_INPUTS)
    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "kl")

    def __post_init__(self) -> None:
        check_denoising(self.denoising)
        if self.denoising.prediction != "flow":
            raise ConfigError(
                f"objective.denoising.name is {self.denoising.name!r}, and Flow-GRPO samples flows by an SDE, which "
                "schedules of betas do not have here. Start from a run of flow_matching."
            )
        check_reference(self.reference)
        if not self.kl and changed_fields(self, ("reference",)):
            raise ConfigError("objective.kl is 0, so objective.reference would have no effect. Leave it out.")
        if self.minibatches == 1 and (unused := changed_fields(self, ("clip_low", "clip_high"))):
            raise ConfigError(
                f"A batch has one update, in which all ratios are 1, so objective.{' and objective.'.join(unused)} "
                "would have no effect. Raise objective.minibatches, or leave that out."
            )

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return {"reference": self.reference} if self.kl else {}

    def advantages(self, rewards: Float[np.ndarray, "groups size"]) -> Float[np.ndarray, "groups size"]:
        """Computes the advantages of images, on the host."""
        groups = np.repeat(np.arange(len(rewards)), rewards.shape[1])
        found = group_normalized(rewards.ravel(), groups).reshape(rewards.shape)
        return np.clip(found, -self.max_advantage, self.max_advantage)

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        images, advantages, real = batch["images"], batch["advantages"], batch["weights"]
        # Rows that fill a batch have zeros, and no normal distribution has the deviation 0.
        coefficients = jnp.where(real[:, None] > 0, batch["coefficients"], 1.0)
        condition = condition_of(batch, self.inputs)

        def mean_of(velocity: jax.Array) -> jax.Array:
            return step_mean(images, velocity.astype(jnp.float32), coefficients)

        mean = mean_of(model(images, batch["timesteps"], condition))
        logprobs, old_logprobs = (
            step_logprob(batch["next_images"], each, coefficients) for each in (mean, mean_of(batch["velocities"]))
        )
        log_ratio = jnp.clip(logprobs - old_logprobs, -MOST_LOG_RATIO, MOST_LOG_RATIO)
        bounds = {"low": self.clip_low, "high": self.clip_high}
        losses = clipped_loss(log_ratio, advantages, **bounds)
        weight = jnp.sum(real)

        def average(values: Float[Array, " batch"]) -> Metric:
            return Metric.mean(jnp.sum(values * real) / jnp.maximum(weight, 1.0), weight)

        metrics = {"reward": average(batch["rewards"])}
        if self.kl:
            reference = auxiliary["reference"](images, batch["timesteps"], condition)
            divergence = step_kl(mean, jax.lax.stop_gradient(mean_of(reference)), coefficients)
            losses += self.kl * divergence
            metrics["kl"] = average(divergence)
        metrics["clipped"] = average(is_clipped(log_ratio, advantages, **bounds).astype(jnp.float32))
        loss = average(losses)
        return loss.value, {"loss": loss, **metrics}
