"""`objective.name: consistency_distill`: distillation of a denoiser to a few steps of the sampler `lcm`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_train.diffusion.denoiser import (
    LOSS_WEIGHTS,
    TIMESTEPS,
    Condition,
    Denoiser,
    Images,
    condition_of,
    image_tokens,
)
from stack_train.diffusion.levels import boundary_scales, solver_timesteps
from stack_train.diffusion.noise import FlowConfig
from stack_train.diffusion.objectives import DenoisingConfig
from stack_train.diffusion.samplers import LCM_STEPS, SamplerConfig, guided, image_coefficients, transfer_coefficients
from stack_train.step.auxiliary import AVERAGE, INIT

__all__ = ["ConsistencyDistillConfig"]

_NOISE, _STEP, _DROPOUT, _GUIDANCE = 0, 1, 2, 3  # streams of the objective's key
_NAMES = ("epsilon", "flow_matching", "v")
_SAMPLING = ("times", "logit_mean", "logit_std", "min_snr")  # fields of denoising objectives that do not act here


def _entries() -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    return {each.name: each for each in registries.objectives.entries() if each.name in _NAMES}, {}


# A part of the registry, because an objective that may contain any other could contain itself.
_DENOISING: Final[Registry[Any]] = Registry("denoising objectives", _entries)


@dataclass(frozen=True)
class _Solver:
    """Coefficients of the solver's steps from t_n to t_(n-1), for x at t_n and the denoiser's prediction m.

    Attributes:
      timesteps: t_0 to t_N, [steps + 1].
      alphas, sigmas: coefficients of image and noise, [steps + 1].
      to_image: coefficients of x and m in f(x, t), [steps + 1] each.
      to_next: coefficients of x at t_n and m in x at t_(n-1), [steps] each.
    """

    timesteps: np.ndarray
    alphas: np.ndarray
    sigmas: np.ndarray
    to_image: tuple[np.ndarray, np.ndarray]
    to_next: tuple[np.ndarray, np.ndarray]


@config
class ConsistencyDistillConfig(Objective):
    """Latent consistency distillation: trains a student to predict the end of its teacher's trajectory in one step.

        l = mean d(f(x, t_n) - f'(x', t_(n-1))),  f(x, t) = c_skip(t) x + c_out(t) (p x + q model(x, t))

    x is a noisy image at a random time t_n of the solver, and x' the result of the teacher's DDIM step, with guidance.
    p x + q m is the image for a prediction m. The teacher is the model at the start of the run. f' has the student's
    averaged weights (`optimizer.ema_decay`), or without an average its current weights. d(y) is the pseudo-Huber
    distance sqrt(y^2 + c^2) - c, or y^2.

    For a flow, t_n are equal times, shifted, and DDIM is Euler's step of the velocity. Its f(x, t) = x - t v is x at
    time 0, so c_skip = 0 and c_out = 1.

    Attributes:
      denoising: objective of the start, `flow_matching`, `epsilon` or `v`: noise schedule, prediction and condition
        dropout.
      name: selects this objective.
      solver_steps: N, the number of times t_1 to t_N.
      guidance: w of the teacher, as in `SamplerConfig`, which the student learns. It is LCM's w plus 1.
      max_guidance: upper end of a range, sampled uniformly for each example; None keeps `guidance`.
      timestep_scaling: factor of the timesteps in c_skip and c_out; a larger one moves the image away from x sooner.
      distance: d.
      huber_scale: c.

    Source: Luo et al., Latent Consistency Models, 2023 (arXiv:2310.04378), algorithm 1; Song et al., Consistency
    Models, 2023 (arXiv:2303.01469). Without an average: Song and Dhariwal, 2023 (arXiv:2310.14189). Departures: (1) The
    guidance is not an input of the student, as in LCM-LoRA (arXiv:2311.05556). (2) `condition_dropout` of `denoising`
    trains the student without conditions, too.
    """

    denoising: Annotated[Any, Selected(_DENOISING)]
    name: Literal["consistency_distill"] = "consistency_distill"
    solver_steps: PositiveInt = 50
    guidance: NonNegativeFloat = 1.0
    max_guidance: NonNegativeFloat | None = None
    timestep_scaling: PositiveFloat = 10.0
    distance: Literal["pseudo_huber", "squared"] = "pseudo_huber"
    huber_scale: PositiveFloat = 0.001

    needs_start: ClassVar[bool] = True
    inputs: ClassVar[Mapping[str, str]] = DenoisingConfig.inputs

    def __post_init__(self) -> None:
        if not isinstance(self.denoising, DenoisingConfig):
            raise ConfigError(
                f"objective.denoising is {self.denoising!r}, which trains no denoiser. Choose the objective of the "
                f"run's start: {', '.join(_NAMES)}."
            )
        sampling = [name for name in _SAMPLING if hasattr(self.denoising, name)]
        unused = [f"denoising.{name}" for name in changed_fields(self.denoising, sampling)]
        unused += changed_fields(self, ("huber_scale",)) if self.distance == "squared" else []
        if unused:
            raise ConfigError(
                f"objective.{' and objective.'.join(unused)} would have no effect: distillation has times and a "
                "distance of its own. Leave it out."
            )
        if self.max_guidance is not None and self.max_guidance <= self.guidance:
            raise ConfigError(
                f"objective.max_guidance={self.max_guidance} is not above guidance={self.guidance}. Leave it out for a "
                "single guidance."
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        schedule = self.denoising.schedule(1)
        if isinstance(schedule, FlowConfig):
            if changed_fields(self, ("timestep_scaling",)):
                raise ConfigError(
                    f"objective.timestep_scaling={self.timestep_scaling} would have no effect on a flow, whose "
                    "velocity leads to the image itself at time 0. Leave it out."
                )
        elif self.solver_steps > schedule.steps:
            raise ConfigError(
                f"objective.solver_steps={self.solver_steps} is more than the {schedule.steps} of the noise schedule. "
                "Reduce it."
            )
        elif schedule.zero_snr and self.denoising.prediction == "epsilon":
            raise ConfigError(
                "objective.denoising.noise.zero_snr: the last timestep is pure noise, where a prediction of noise has "
                "no image. Distill a model of v instead."
            )

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return {"teacher": INIT, "target": AVERAGE}

    @property
    def sampler(self) -> SamplerConfig:
        """The sampler of the student: 4 steps of lcm."""
        steps = min(LCM_STEPS, self.solver_steps)
        settings = {"solver_steps": self.solver_steps, "timestep_scaling": self.timestep_scaling}
        return SamplerConfig(name="lcm", steps=steps, **settings)

    def solver(self, tokens: int) -> _Solver:
        """Computes the coefficients of the solver for images of this many tokens, in float64."""
        schedule, prediction = self.denoising.schedule(tokens), self.denoising.prediction
        if isinstance(schedule, FlowConfig):
            sigmas = schedule.shifted(np.arange(self.solver_steps + 1) / self.solver_steps)
            alphas, timesteps = 1.0 - sigmas, sigmas * TIMESTEPS
            skip, out = np.zeros_like(sigmas), np.ones_like(sigmas)
        else:
            places = np.append(0, solver_timesteps(schedule, self.solver_steps))
            alphas, sigmas = (each[places] for each in schedule.alphas_and_sigmas())
            timesteps = places.astype(np.float64)
            skip, out = boundary_scales(timesteps, self.timestep_scaling)
        p, q = image_coefficients(prediction, alphas, sigmas)
        step = transfer_coefficients(prediction, alphas[1:], sigmas[1:], alphas[:-1], sigmas[:-1])
        return _Solver(timesteps, alphas, sigmas, (skip + out * p, out * q), step)

    def __call__(
        self, model: Denoiser, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        images, real, condition = batch["images"], batch["weights"], condition_of(batch)
        rows, channels = images.shape[0], images.shape[-1]
        solver = self.solver(image_tokens(model, *images.shape[1:-1]))
        noise = jax.random.normal(jax.random.fold_in(key, _NOISE), images.shape, images.dtype)
        step = jax.random.randint(jax.random.fold_in(key, _STEP), (rows,), 1, self.solver_steps + 1)
        dropout_key = jax.random.fold_in(key, _DROPOUT)
        shown = self.denoising.drop_condition(model, condition, rows, key=dropout_key)

        def at(values: np.ndarray, places: Array) -> Float[Array, "batch ..."]:
            return jnp.asarray(values, jnp.float32)[places].reshape(-1, *[1] * (images.ndim - 1))

        def combined(coefficients: tuple[np.ndarray, np.ndarray], places: Array, x: Images, predicted: Array) -> Images:
            of_x, of_predicted = (at(each, places) for each in coefficients)
            return of_x * x + of_predicted * predicted[..., :channels].astype(jnp.float32)

        def end(denoiser: Denoiser, x: Images, places: Array) -> Images:
            timesteps = jnp.asarray(solver.timesteps, jnp.float32)[places]
            return combined(solver.to_image, places, x, denoiser(x, timesteps, shown))

        x = at(solver.alphas, step) * images + at(solver.sigmas, step) * noise
        guidance = self._guidance(condition, images, key=jax.random.fold_in(key, _GUIDANCE))
        # Guidance needs the negative conditions, which `shown` may lack.
        predict = guided(auxiliary["teacher"], {**condition, **shown}, images=rows, guidance=guidance)
        predicted = predict(x, jnp.asarray(solver.timesteps, jnp.float32)[step])
        before = combined(solver.to_next, step - 1, x, predicted)
        target = jax.lax.stop_gradient(end(auxiliary["target"], jax.lax.stop_gradient(before), step - 1))
        errors = end(model, x, step) - target
        total = jnp.sum(real)

        def mean(values: Images, weights: Array = real) -> Metric:
            each = jnp.mean(values, axis=tuple(range(1, images.ndim)))
            return Metric.mean(jnp.sum(each * weights) / jnp.maximum(total, 1.0), total)

        squares = jnp.square(errors)
        c = self.huber_scale
        distances = squares if self.distance == "squared" else jnp.sqrt(squares + c**2) - c
        loss = mean(distances, real * batch.get(LOSS_WEIGHTS, jnp.ones(())))
        return loss.value, {"loss": loss, "squared_error": mean(squares)}

    def _guidance(self, condition: Condition, images: Images, *, key: jax.Array) -> Any:
        """Returns the guidance of all examples, or draws one for each."""
        if not condition and (self.guidance != 1.0 or self.max_guidance is not None):
            raise ConfigError(
                f"objective.guidance is {self.guidance}, and the data has no condition to be guided by. Set it to 1, "
                "and leave max_guidance out."
            )
        if self.max_guidance is None:
            return self.guidance
        shape = (images.shape[0], *[1] * (images.ndim - 1))
        return jax.random.uniform(key, shape, minval=self.guidance, maxval=self.max_guidance)
