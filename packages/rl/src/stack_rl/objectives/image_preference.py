"""`objective.name: diffusion_dpo`: preferences between two images of one prompt, on `data.name: image_pairs`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, PositiveFloat

from stack_core.abi.config import Selected, config
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_rl.math.preference import accuracy, dpo_loss, dpo_margin
from stack_rl.objectives.denoising import DENOISING, check_denoising, check_reference, condition_of

__all__ = ["DiffusionDPOConfig"]

_INPUTS = {"images": "batch pair *frames height width channels", "weights": "batch"}
_NOISE, _LEVEL, _DROPOUT = 0, 1, 2  # streams of the objective's key


@config
class DiffusionDPOConfig(Objective):
    """Diffusion-DPO: makes preferred images more likely than rejected ones, relative to a reference.

        l = -log sigmoid(beta / 2 ((e_ref - e)(preferred) - (e_ref - e)(rejected)))

    e = w(t) mean |target - model(x_t, t)|^2 is the error of the denoiser for a noisy image, and e_ref the reference's.
    Both images of a pair have the same noise, timestep and condition. The mean is over pixels and channels.

    Attributes:
      denoising: objective that the start was trained by, `flow_matching`, `epsilon` or `v`: noise levels, target and
        condition dropout. For flows, e is the error of the velocity.
      name: selects this objective.
      beta: strength of the penalty for leaving the reference; the paper's beta T, 2000 for SD 1.5 and 5000 for SDXL.
      label_smoothing: assumed fraction of pairs with a wrong label.
      reference: frozen reference, "init", the model at the start of the run, or "run:DIRECTORY".

    Source: Wallace et al., Diffusion model alignment using direct preference optimization, 2023 (arXiv:2311.12908),
    equation 14. Departures: (1) e is a mean over pixels and not a sum, as in the authors' code, whose beta it has.
    """

    denoising: Annotated[Any, Selected(DENOISING)]
    name: Literal["diffusion_dpo"] = "diffusion_dpo"
    beta: PositiveFloat = 2000.0
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    reference: str = "init"

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(_INPUTS)
    shown_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin")

    def __post_init__(self) -> None:
        check_denoising(self.denoising)
        check_reference(self.reference)

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return {"reference": self.reference}

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        errors, reference_errors = self._errors(model, auxiliary["reference"], batch, key=key)
        # -e / 2 takes the place of log p in the loss of language models.
        margin = dpo_margin(-0.5 * errors, -0.5 * reference_errors, beta=self.beta)
        real = batch["weights"]
        weight = jnp.sum(real)

        def mean(values: Float[Array, " batch"]) -> Metric:
            return Metric.mean(jnp.sum(values * real) / jnp.maximum(weight, 1.0), weight)

        loss = mean(dpo_loss(margin, label_smoothing=self.label_smoothing))
        return loss.value, {
            "loss": loss,
            "margin": mean(margin),
            "accuracy": mean(accuracy(margin)),
            "error_chosen": mean(errors[:, 0]),
            "error_rejected": mean(errors[:, 1]),
        }

    def _errors(
        self, model: Any, reference: Any, batch: Mapping[str, jax.Array], *, key: jax.Array
    ) -> tuple[Float[Array, "batch 2"], Float[Array, "batch 2"]]:
        """Computes the errors of the model and of the reference for both images of each pair."""
        pairs = batch["images"]
        chosen, rejected = pairs[:, 0], pairs[:, 1]
        rows = len(pairs)
        noise = jax.random.normal(jax.random.fold_in(key, _NOISE), chosen.shape, chosen.dtype)
        level_key = jax.random.fold_in(key, _LEVEL)
        # Equal keys give both images of a pair the same timestep.
        noisy = [self.denoising.noisy(model, images, noise, key=level_key) for images in (chosen, rejected)]
        x, timesteps, targets, weights = (jnp.concatenate(each) for each in zip(*noisy, strict=True))
        condition = condition_of(batch, self.inputs)
        dropped = self.denoising.drop_condition(model, condition, rows, key=jax.random.fold_in(key, _DROPOUT))
        both = {name: jnp.concatenate([array, array]) for name, array in dropped.items()}

        def errors(denoiser: Any) -> Float[Array, "batch 2"]:
            # Additional channels may predict variances; these are not trained.
            predicted = denoiser(x, timesteps, both)[..., : pairs.shape[-1]].astype(jnp.float32)
            means = jnp.mean(jnp.square(predicted - targets), axis=tuple(range(1, x.ndim)))
            return jnp.stack(jnp.split(weights * means, 2), axis=1)

        return errors(model), jax.lax.stop_gradient(errors(reference))
