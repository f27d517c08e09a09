"""Samplers as tables: each step is one linear combination, so that one compiled scan runs every sampler.

A noisy image is x = alpha x0 + sigma e. A denoiser's prediction m gives an estimate of the image, d = p x + q m,
and a sampler continues with less noise by

    x' = a x + b d + c d' + n z

with d' the estimate of the previous row and z new noise. All samplers use this scale of x. In it, the Euler step of
Karras et al., y' = y + (s' - s) (y - d) / s with y = x / alpha and s = sigma / alpha, equals the DDIM step,

    x' = (sigma' / sigma) x + (alpha' - alpha sigma' / sigma) d,

and if alpha = 1 - sigma it is the step of a flow, x + (sigma' - sigma) m.

Sources: Song et al., DDIM, 2020 (arXiv:2010.02502); Karras et al., EDM, 2022 (arXiv:2206.00364), for Euler and Heun; Lu
et al., DPM-Solver++, 2022 (arXiv:2211.01095).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from pydantic import Field, NonNegativeFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.denoiser import TIMESTEPS, Condition, Denoiser, Images, Predicted, positive
from stack_train.diffusion.noise import FlowConfig, NoiseConfig, Prediction, Schedule

__all__ = ["Levels", "SamplerConfig", "Table", "guided", "levels_of", "sample", "table_of"]

Spacing = Literal["leading", "trailing", "linspace"]


@config
class SamplerConfig:
    """Settings of a sampler of images.

    Attributes:
      name: "euler" takes a straight step, "ddim" the same and, with `eta`, new noise; "heun" corrects each step by a
        second call of the denoiser; "dpmpp_2m" is DPM-Solver++, which corrects with the previous step.
      steps: number of steps from noise to image.
      spacing: spacing of the steps of a discrete schedule: integer strides from its first step ("leading") or its last
        step ("trailing"), or equal distances ("linspace", the default). Flows do not support it.
      eta: fraction of DDPM's noise that DDIM adds.
      guidance: w of m = m_none + w (m_condition - m_none); 1 evaluates only the conditional prediction.
      guidance_rescale: fraction by which the standard deviation added by guidance is reduced.

    Sources: guidance: Ho and Salimans, 2022 (arXiv:2207.12598); its rescale: Lin et al., 2023 (arXiv:2305.08891).
    """

    name: Literal["ddim", "euler", "heun", "dpmpp_2m"] = "euler"
    steps: PositiveInt = 50
    spacing: Spacing | None = None
    eta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    guidance: NonNegativeFloat = 1.0
    guidance_rescale: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0

    def __post_init__(self) -> None:
        if self.eta and self.name != "ddim":
            raise ConfigError(f"eta={self.eta} is noise that ddim alone adds, not {self.name}. Set it to 0.")
        if self.guidance_rescale and self.guidance == 1.0:
            raise ConfigError(
                f"guidance_rescale={self.guidance_rescale} takes back contrast that guidance adds, and guidance is 1, "
                "which adds none. Set guidance above 1, or guidance_rescale to 0."
            )


@dataclass(frozen=True)
class Levels:
    """The noise levels of a sampler in descending order, ending without noise.

    Attributes:
      timesteps: timestep inputs of the denoiser, [steps].
      alphas, sigmas: coefficients of each level and of the final image, [steps + 1].
      scales: k, [steps + 1]: y = x / k goes along a straight line while d stays, with s = sigma / k as its time.
    """

    timesteps: np.ndarray
    alphas: np.ndarray
    sigmas: np.ndarray
    scales: np.ndarray


@dataclass(frozen=True)
class Table:
    """A sampler: `rows`, [rows, 7], of timestep, p, q, a, b, c and n as defined in the module's docstring."""

    rows: np.ndarray


def levels_of(schedule: Schedule, steps: int, spacing: Spacing | None = None) -> Levels:
    """Returns the noise levels for a number of steps; a flow takes equal steps in time and then shifts them.

    Raises:
      ConfigError: the schedule has fewer steps, or `spacing` is set for a flow.
    """
    if isinstance(schedule, FlowConfig):
        if spacing is not None:
            raise ConfigError(
                f"spacing={spacing!r} chooses among the whole timesteps of a schedule of betas; this model was trained "
                "by flow matching, whose steps are equal in time. Leave it out."
            )
        sigmas = np.append(schedule.shifted(np.linspace(1.0, 1.0 / steps, steps)), 0.0)
        return Levels(sigmas[:-1] * TIMESTEPS, 1.0 - sigmas, sigmas, np.ones_like(sigmas))
    return _discrete_levels(schedule, steps, spacing or "linspace")


def _discrete_levels(schedule: NoiseConfig, steps: int, spacing: Spacing) -> Levels:
    if steps > schedule.steps:
        raise ConfigError(f"{steps} steps are more than the {schedule.steps} of the noise schedule. Take fewer.")
    last = schedule.steps - 1
    match spacing:
        case "leading":
            timesteps = (np.arange(steps) * (schedule.steps // steps))[::-1].astype(np.float64)
        case "trailing":
            timesteps = np.round(np.arange(schedule.steps, 0, -schedule.steps / steps)[:steps]) - 1.0
        case "linspace":
            timesteps = np.linspace(0.0, last, steps)[::-1] if steps > 1 else np.array([float(last)])
    alphas, sigmas = schedule.alphas_and_sigmas()
    ratios = np.interp(timesteps, np.arange(schedule.steps), sigmas / alphas)  # timesteps may be fractional
    # alpha from sigma / alpha, since alpha^2 + sigma^2 = 1.
    kept = np.append(1.0 / np.sqrt(1.0 + ratios**2), 1.0)
    return Levels(timesteps, kept, np.append(ratios, 0.0) * kept, kept)


def table_of(sampler: SamplerConfig, levels: Levels, prediction: Prediction) -> Table:
    """The rows of a sampler on given levels, for a denoiser that says `prediction`."""
    return Table(np.concatenate([_of_step(sampler, levels, step, prediction) for step in range(len(levels.timesteps))]))


def _of_step(sampler: SamplerConfig, levels: Levels, step: int, prediction: Prediction) -> np.ndarray:
    def row(level: int, *coefficients: float) -> list[float]:
        expected = _expected(prediction, levels.alphas[level], levels.sigmas[level])
        return [levels.timesteps[level], *expected, *coefficients]

    euler = row(step, *_euler(levels, step), 0.0, 0.0)
    # The last step ends without noise: Euler's step is exact, and corrections would divide by zero.
    match sampler.name:
        case "heun" if levels.sigmas[step + 1]:
            return np.array([euler, row(step + 1, 1.0, *_heun_correction(levels, step), 0.0)])
        # The first step lacks an earlier estimate.
        case "dpmpp_2m" if step and levels.sigmas[step + 1]:
            return np.array([row(step, *_dpmpp_2m(levels, step), 0.0)])
        case "ddim" if sampler.eta and levels.sigmas[step + 1]:
            return np.array([row(step, *_ddim(levels, step, sampler.eta))])
    return np.array([euler])


def _expected(prediction: Prediction, alpha: float, sigma: float) -> tuple[float, float]:
    """p and q of d = p x + q m."""
    match prediction:
        case "epsilon":
            return 1.0 / alpha, -sigma / alpha
        case "v":  # where alpha^2 + sigma^2 = 1
            return alpha, -sigma
        case "flow":  # where alpha + sigma = 1
            return 1.0, -sigma


def _euler(levels: Levels, step: int) -> tuple[float, float]:
    """a and b."""
    ratio = levels.sigmas[step + 1] / levels.sigmas[step]
    return ratio, levels.alphas[step + 1] - levels.alphas[step] * ratio


def _ddim(levels: Levels, step: int, eta: float) -> tuple[float, float, float, float]:
    """Returns a, b, c and n; n is the part of the next level's noise that is new."""
    ratio = levels.sigmas[step + 1] / levels.sigmas[step]
    noise = eta * ratio * np.sqrt(1.0 - (levels.alphas[step] / levels.alphas[step + 1]) ** 2)
    kept = np.sqrt(levels.sigmas[step + 1] ** 2 - noise**2) / levels.sigmas[step]
    return kept, levels.alphas[step + 1] - levels.alphas[step] * kept, 0.0, noise


def _heun_correction(levels: Levels, step: int) -> tuple[float, float]:
    """b and c of the row after Euler's: the mean of the slopes at both ends, (y - d') / s and (y' - d) / s'.

    As Euler's y' is on the line from y to d', their mean leads to y' + (1 - r) / (2 r) (d - d') with r = s' / s.
    """
    next_scale = levels.scales[step + 1]
    ratio = (levels.sigmas[step + 1] * levels.scales[step]) / (next_scale * levels.sigmas[step])
    change = next_scale * (1.0 - ratio) / (2.0 * ratio)
    return change, -change


def _dpmpp_2m(levels: Levels, step: int) -> tuple[float, float, float]:
    """a, b and c: Euler's step to where the last two expected images lead, by the logarithm of alpha / sigma."""
    with np.errstate(divide="ignore"):  # pure noise, where it is -inf: the step from there says nothing
        before, now, after = np.log(levels.alphas[step - 1 : step + 2] / levels.sigmas[step - 1 : step + 2])
    a, b = _euler(levels, step)
    ahead = (after - now) / (2.0 * (now - before))
    return a, b * (1.0 + ahead), -b * ahead


def sample(
    denoise: Callable[[Images, Float[Array, ""]], Images], table: Table, noise: Images, *, keys: Key[Array, " images"]
) -> Images:
    """Runs a sampler from noise to images.

    Args:
      denoise: (noisy images, timestep) -> prediction.
      noise: normal noise in the shape of the images.
      keys: PRNG key of each image, for the noise that rows add. An image does not depend on the others. The initial
        noise may come from the same keys, because rows fold their number into them.
    """
    # Known before tracing, so deterministic samplers generate no random numbers.
    adds_noise = bool(table.rows[:, -1].any())

    def step(carry: tuple[Images, Images], row: tuple[Array, Array]) -> tuple[tuple[Images, Images], None]:
        (x, before), ((timestep, p, q, a, b, c, n), number) = carry, row
        expected = p * x + q * denoise(x, timestep)
        following = a * x + b * expected + c * before
        if adds_noise:
            row_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
            following += n * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(row_keys)
        return (following, expected), None

    # float32 only here: the coefficients are differences of close numbers, so NumPy computes them in float64.
    rows = (jnp.asarray(table.rows, jnp.float32), jnp.arange(len(table.rows)))
    # c is 0 in the first row, so the initial estimate is never used.
    (images, _), _ = jax.lax.scan(step, (noise, jnp.zeros_like(noise)), rows)
    return images


def guided(
    denoiser: Denoiser, condition: Condition, *, images: int, guidance: float, rescale: float = 0.0
) -> Callable[[Images, Float[Array, ""]], Predicted]:
    """Returns the guided prediction for a number of images with `condition`, for `sample`; see `SamplerConfig`."""

    def plain(x: Images, timestep: Float[Array, ""]) -> Predicted:
        return denoiser(x, jnp.broadcast_to(timestep, (images,)), condition)

    def strengthened(x: Images, timestep: Float[Array, ""]) -> Predicted:
        # One call with twice as many rows runs both predictions.
        said_of_both = denoiser(jnp.concatenate([x, x]), jnp.broadcast_to(timestep, (2 * images,)), both)
        with_condition, without = jnp.split(said_of_both, 2)
        said = without + guidance * (with_condition - without)
        axes = tuple(range(1, x.ndim))
        ratio = with_condition.std(axes, keepdims=True) / said.std(axes, keepdims=True)
        return said * (1.0 - rescale + rescale * ratio) if rescale else said

    if guidance == 1.0 or not condition:
        return plain
    without = denoiser.unconditional(condition)
    both = {name: jnp.concatenate([array, without[name]]) for name, array in positive(condition).items()}
    return strengthened
