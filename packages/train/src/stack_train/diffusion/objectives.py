"""`objective.name: epsilon`, `v` and `flow_matching`: training targets of denoisers."""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_train.diffusion.denoiser import (
    LOSS_WEIGHTS,
    TIMESTEPS,
    Condition,
    Denoiser,
    Images,
    condition_of,
    image_tokens,
    positive,
)
from stack_train.diffusion.noise import DynamicShift, FlowConfig, NoiseConfig, Prediction, Schedule
from stack_train.diffusion.samplers import SamplerConfig

__all__ = [
    "Denoises",
    "DenoisingConfig",
    "EpsilonConfig",
    "FlowMatchingConfig",
    "VConfig",
    "denoising_of",
    "sampler_of",
]

_IMAGES, _WEIGHTS = "images", "weights"
_NOISE, _LEVEL, _DROPOUT = 0, 1, 2  # streams of the objective's key


@runtime_checkable
class Denoises(Protocol):
    """An objective with the prediction type and noise schedule that samplers need."""

    @property
    def prediction(self) -> Prediction: ...

    def schedule(self, tokens: int) -> Schedule:
        """Returns the schedule of images of this many tokens; see `image_tokens`."""
        ...


def denoising_of(objective: Any) -> Any:
    """Returns an objective, or its field `denoising`, which defines the denoiser's prediction in post-training."""
    return getattr(objective, "denoising", objective)


def sampler_of(objective: Any, default: SamplerConfig | None = None) -> SamplerConfig:
    """Returns the sampler that an objective trains for, its property `sampler`; `default` for other objectives."""
    return getattr(objective, "sampler", default or SamplerConfig())


@config
class DenoisingConfig(Objective):
    """Mean squared error of a denoiser's predictions for noisy images.

        loss = mean_b weight(t_b) |model(alpha_b x_b + sigma_b e_b, t_b, condition_b) - target_b|^2

    "loss_weights" of a batch, if any, are factors of weight(t_b). The condition consists of all arrays of a batch
    except "images", "weights" and "loss_weights".

    Attributes:
      condition_dropout: fraction of examples trained without their condition, for classifier-free guidance (Ho and
        Salimans, 2022, arXiv:2207.12598).
    """

    condition_dropout: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {_IMAGES: "batch *frames height width channels", _WEIGHTS: "batch"}
    )

    @abc.abstractmethod
    def noisy(
        self, model: Denoiser, images: Images, noise: Images, *, key: jax.Array
    ) -> tuple[Images, Float[Array, " batch"], Images, Float[Array, " batch"]]:
        """Samples timesteps; returns noisy images, timesteps, targets, and the weight of each image.

        Args:
          model: the denoiser, whose number of patches determines schedules that depend on the image size.
        """

    def __call__(
        self, model: Denoiser, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        images, real = batch[_IMAGES], batch[_WEIGHTS]
        condition = condition_of(batch)
        noise = jax.random.normal(jax.random.fold_in(key, _NOISE), images.shape, images.dtype)
        level_key = jax.random.fold_in(key, _LEVEL)
        noisy, timesteps, target, weight = self.noisy(model, images, noise, key=level_key)
        shown = self.drop_condition(model, condition, images.shape[0], key=jax.random.fold_in(key, _DROPOUT))
        # Additional channels may predict variances (Nichol and Dhariwal, 2021); these are not trained.
        predicted = model(noisy, timesteps, shown)[..., : images.shape[-1]]
        errors = jnp.mean(jnp.square(predicted.astype(jnp.float32) - target), axis=tuple(range(1, images.ndim)))
        # Rows that fill a batch have weight 0.
        total = jnp.sum(real)

        def mean(values: Float[Array, " batch"]) -> Metric:
            return Metric.mean(jnp.sum(values * real) / jnp.maximum(total, 1.0), total)

        loss = mean(weight * batch.get(LOSS_WEIGHTS, jnp.ones(())) * errors)
        return loss.value, {"loss": loss, "squared_error": mean(errors)}

    def drop_condition(self, model: Denoiser, condition: Condition, rows: int, *, key: jax.Array) -> Condition:
        """Replaces the condition of a random fraction, `condition_dropout`, of the rows by the unconditional one."""
        if not condition or not self.condition_dropout:
            return condition
        dropped = jax.random.bernoulli(key, self.condition_dropout, (rows,))

        def mixed(value: Array, none: Array) -> Array:
            return jnp.where(_per_image(dropped, value), none, value)

        return jax.tree.map(mixed, dict(positive(condition)), dict(model.unconditional(condition)))


def _per_image(values: Shaped[Array, " batch"], like: Shaped[Array, "batch ..."]) -> Shaped[Array, "batch ..."]:
    """Reshapes one value per image to broadcast with arrays like `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


@config
class FlowMatchingConfig(DenoisingConfig):
    """Trains the velocity e - x0 of the straight line x = (1 - sigma) x0 + sigma e.

    Attributes:
      name: selects this objective.
      times: distribution of the times before `shift` is applied: uniform, or logistic of a normal variable, which
        samples the middle more often.
      logit_mean, logit_std: mean and standard deviation of the normal variable.
      shift: values above 1 train more at high noise, which larger images need; a `DynamicShift`, given by its keys,
        depends on the size of the images.

    Sources: Lipman et al., Flow Matching, 2023 (arXiv:2210.02747); Liu et al., 2023 (arXiv:2209.03003); logit-normal
    times and the shift: Esser et al., 2024 (arXiv:2403.03206).
    """

    name: Literal["flow_matching"] = "flow_matching"
    times: Literal["uniform", "logit_normal"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: PositiveFloat = 1.0
    shift: PositiveFloat | DynamicShift = 1.0

    def __post_init__(self) -> None:
        if self.times == "uniform" and (unused := changed_fields(self, ("logit_mean", "logit_std"))):
            raise ConfigError(
                f"objective.times is 'uniform', so objective.{' and objective.'.join(unused)} would have no effect. "
                "Remove it, or choose times: logit_normal."
            )

    @property
    def prediction(self) -> Prediction:
        return "flow"

    def schedule(self, tokens: int) -> FlowConfig:
        if isinstance(self.shift, DynamicShift):
            return FlowConfig(shift=self.shift.at(tokens), lowest_time=1.0 / TIMESTEPS)
        # diffusers takes the lowest time from levels that are shifted once, and shifts them again.
        return FlowConfig(shift=self.shift)

    def noisy(
        self, model: Denoiser, images: Images, noise: Images, *, key: jax.Array
    ) -> tuple[Images, Float[Array, " batch"], Images, Float[Array, " batch"]]:
        shape = images.shape[:1]
        if self.times == "uniform":
            times = jax.random.uniform(key, shape)
        else:
            times = jax.nn.sigmoid(self.logit_mean + self.logit_std * jax.random.normal(key, shape))
        sigmas = self.schedule(image_tokens(model, *images.shape[1:-1])).shifted(times)
        share = _per_image(sigmas, images)
        return (1.0 - share) * images + share * noise, sigmas * TIMESTEPS, noise - images, jnp.ones(shape)


@config
class _DiscreteConfig(DenoisingConfig):
    """Objective with integer timesteps, sampled uniformly from a noise schedule.

    Attributes:
      noise: the noise schedule.
      min_snr: g in the weight min(snr, g) / snr of the noise error, with snr = alpha^2 / sigma^2, which limits the
        influence of images with little noise; None weights all timesteps equally (Hang et al., 2023, arXiv:2303.09556).
    """

    noise: NoiseConfig = NoiseConfig()
    min_snr: NonNegativeFloat | None = None

    def schedule(self, tokens: int) -> NoiseConfig:
        return self.noise

    def noisy(
        self, model: Denoiser, images: Images, noise: Images, *, key: jax.Array
    ) -> tuple[Images, Float[Array, " batch"], Images, Float[Array, " batch"]]:
        timesteps = jax.random.randint(key, images.shape[:1], 0, self.noise.steps)
        # The schedule is computed in NumPy while tracing, and is a constant of the program.
        alphas, sigmas = (jnp.asarray(array, jnp.float32)[timesteps] for array in self.noise.alphas_and_sigmas())
        alpha, sigma = _per_image(alphas, images), _per_image(sigmas, images)
        weight = jnp.ones_like(alphas) if self.min_snr is None else self.weight((alphas / sigmas) ** 2, self.min_snr)
        target = self.target(images, noise, alpha, sigma)
        return alpha * images + sigma * noise, timesteps.astype(jnp.float32), target, weight

    @abc.abstractmethod
    def target(self, images: Images, noise: Images, alpha: Array, sigma: Array) -> Images:
        """Returns the target of the prediction."""

    @abc.abstractmethod
    def weight(self, snr: Float[Array, " batch"], limit: float) -> Float[Array, " batch"]:
        """Computes the weight of an error from the signal-to-noise ratio."""


@config
class EpsilonConfig(_DiscreteConfig):
    """Trains the noise e in alpha x0 + sigma e (Ho et al., DDPM, 2020, arXiv:2006.11239).

    Attributes:
      name: selects this objective.
    """

    name: Literal["epsilon"] = "epsilon"

    @property
    def prediction(self) -> Prediction:
        return "epsilon"

    def target(self, images: Images, noise: Images, alpha: Array, sigma: Array) -> Images:
        return noise

    def weight(self, snr: Float[Array, " batch"], limit: float) -> Float[Array, " batch"]:
        return jnp.minimum(snr, limit) / snr


@config
class VConfig(_DiscreteConfig):
    """Trains v = alpha e - sigma x0 (Salimans and Ho, 2022, arXiv:2202.00512).

    Attributes:
      name: selects this objective.
    """

    name: Literal["v"] = "v"

    @property
    def prediction(self) -> Prediction:
        return "v"

    def target(self, images: Images, noise: Images, alpha: Array, sigma: Array) -> Images:
        return alpha * noise - sigma * images

    def weight(self, snr: Float[Array, " batch"], limit: float) -> Float[Array, " batch"]:
        # sigma^2 = 1 / (snr + 1) converts the weight min(snr, g) of errors of x0 to errors of v.
        return jnp.minimum(snr, limit) / (snr + 1.0)
