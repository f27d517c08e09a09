"""Samplers as tables: each step is one linear combination, and one compiled scan runs every sampler.

A noisy image is x = alpha x0 + sigma e. Each row of a table stores h_0 = p x + q m for the denoiser's prediction m. For
most samplers h_0 estimates the image. The row then computes a less noisy image,

    x' = a x + sum_i b_i h_i + n z

with h_i the h_0 of i rows before and z new noise. All samplers use this scale of x. In it, the Euler step of Karras et
al., y' = y + (s' - s) (y - d) / s with y = x / alpha, s = sigma / alpha and d the image, equals the DDIM step,

    x' = (sigma' / sigma) x + (alpha' - alpha sigma' / sigma) d,

and if alpha = 1 - sigma it is the step of a flow, x + (sigma' - sigma) m.

Sources: Song et al., DDIM, 2020 (arXiv:2010.02502); Liu et al., PNDM, 2022 (arXiv:2202.09778); Karras et al., EDM, 2022
(arXiv:2206.00364), for Euler and Heun; Lu et al., DPM-Solver++, 2022 (arXiv:2211.01095); Zhao et al., UniPC, 2023
(arXiv:2302.04867); Luo et al., LCM, 2023 (arXiv:2310.04378).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import changed_fields, config, parse, to_mapping
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.denoiser import Condition, Denoiser, Images, Predicted, positive
from stack_train.diffusion.levels import Levels, SigmaSpacing, boundary_scales, flow_levels, schedule_levels
from stack_train.diffusion.noise import FlowConfig, Prediction, Schedule
from stack_train.diffusion.sampler_names import SamplerName, Spacing

__all__ = [
    "FIXED_COLUMNS",
    "LCM_STEPS",
    "Inpainting",
    "SamplerConfig",
    "Table",
    "guided",
    "image_coefficients",
    "levels_of",
    "sample",
    "table_of",
    "transfer_coefficients",
]

_DPMPP = ("dpmpp_2m", "dpmpp_3m", "dpmpp_2m_sde", "dpmpp_3m_sde")
_DISTILLED = ("solver_steps", "timestep_scaling")  # no other sampler reads these
_FEW_STEPS = 15  # with fewer steps DPM-Solver++ ends with lower orders
LCM_STEPS = 4
"""Default number of steps of lcm, as in diffusers."""
FIXED_COLUMNS = 5
"""Number of columns of a table before the coefficients of the history."""


@config
class SamplerConfig:
    """Settings of a sampler of images.

    Attributes:
      name: "euler" takes a straight step, "ddim" the same and, with `eta`, new noise; "euler_ancestral" adds as much
        noise as DDPM; "heun" corrects each step by a second call of the denoiser; "plms" extrapolates the noise from
        up to four steps; "dpmpp_2m" and "dpmpp_3m" are DPM-Solver++, which extrapolates the image from two or three
        steps, and with "_sde" adds noise; "unipc" extrapolates it from two, and corrects each step by the next
        prediction; "lcm" jumps to the image and adds new noise up to the next level, for models that
        `consistency_distill` trained.
      steps: number of steps from noise to image.
      spacing: spacing of the steps of a discrete schedule: integer strides from its first step ("leading", the default
        and only spacing of plms) or its last step ("trailing"), or equal distances ("linspace", the default). The times
        of a flow are 1, ..., 1 / steps, or, with "linspace", end at the lowest time of 1000, as in Stable Diffusion 3.
        unipc divides a flow down to that time into one more step, and leaves the last one out. lcm divides the
        timesteps of its solver equally.
      steps_offset: added to the timesteps of leading spacing.
      sigmas: spacing of the noise levels instead of the timesteps, between the same first and last level: "karras",
        "exponential", "beta", or, with dpmpp samplers, "lu".
      sigma_min, sigma_max: last and first level of `sigmas`, as noise to image ratio; the defaults are the levels of
        the timesteps.
      terminal: last time of a flow; all times are stretched to end at this value.
      final: noise level after the last step, none ("zero") or the schedule's lowest level ("min").
      eta: fraction of DDPM's noise that DDIM adds.
      correction: form of the second-order term of DPM-Solver++.
      lower_order_final: DPM-Solver++ of fewer than 15 steps ends with lower orders, which is more stable; unipc always.
      euler_at_final: DPM-Solver++ ends with an Euler step also if `final` is "min".
      solver_steps: number of timesteps in the distillation of a model; lcm visits `steps` of these.
      timestep_scaling: factor of the timestep in the boundary condition of lcm, see `boundary_scales`; flows have none.
      guidance: w in m = m_none + w (m_condition - m_none); 1 evaluates only the conditional prediction.
      low_noise_guidance: w of the denoiser of low noise, for models of two denoisers (Wan 2.2); None is `guidance`.
      guidance_rescale: fraction by which the standard deviation added by guidance is reduced.
      strength: fraction of the steps to run if sampling starts from an image; the first steps are skipped.

    Sources: guidance: Ho and Salimans, 2022 (arXiv:2207.12598); its rescale: Lin et al., 2023 (arXiv:2305.08891).
    """

    name: SamplerName = "euler"
    steps: PositiveInt = 50
    spacing: Spacing | None = None
    steps_offset: NonNegativeInt = 0
    sigmas: SigmaSpacing | None = None
    sigma_min: PositiveFloat | None = None
    sigma_max: PositiveFloat | None = None
    terminal: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    final: Literal["zero", "min"] = "zero"
    eta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    correction: Literal["midpoint", "heun"] = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    solver_steps: PositiveInt = 50
    timestep_scaling: PositiveFloat = 10.0
    guidance: NonNegativeFloat = 1.0
    low_noise_guidance: NonNegativeFloat | None = None
    guidance_rescale: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    strength: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        if self.eta and self.name != "ddim":
            raise ConfigError(f"eta={self.eta} is noise that ddim alone adds, not {self.name}. Set it to 0.")
        if self.guidance_rescale and self.guidance == 1.0:
            raise ConfigError(
                f"guidance_rescale={self.guidance_rescale} takes back contrast that guidance adds, and guidance is 1, "
                "which adds none. Set guidance above 1, or guidance_rescale to 0."
            )
        if self.low_noise_guidance is not None and self.guidance == 1.0:
            raise ConfigError(
                f"low_noise_guidance={self.low_noise_guidance} acts with guidance, which is 1. Set guidance above 1."
            )
        self._check_levels()
        multistep = ("correction", "euler_at_final", *(() if self.name == "unipc" else ("lower_order_final",)))
        unused = [] if self.name in _DPMPP else changed_fields(self, multistep)
        unused += [] if self.name == "lcm" else changed_fields(self, _DISTILLED)
        if unused:
            raise ConfigError(f"{' and '.join(unused)} would have no effect on {self.name}. Leave it out.")

    def _check_levels(self) -> None:
        """Checks the settings of noise levels."""
        if self.name == "plms" and self.spacing not in (None, "leading"):
            raise ConfigError(f"spacing={self.spacing!r}: plms steps by equal numbers of timesteps. Set it to leading.")
        if self.name == "lcm" and self.spacing not in (None, "linspace"):
            raise ConfigError(
                f"spacing={self.spacing!r}: lcm divides the timesteps of its solver equally. Leave it out."
            )
        if not self.skipped_steps < self.steps:
            raise ConfigError(f"strength={self.strength} of {self.steps} steps is no step. Increase either.")
        if self.steps_offset and self.spacing != "leading":
            raise ConfigError(f"steps_offset={self.steps_offset} shifts leading steps only. Set spacing to leading.")
        for name, reader in (("sigma_min", self.sigmas), ("sigma_max", self.sigmas)):
            if getattr(self, name) is not None and reader is None:
                raise ConfigError(f"{name}={getattr(self, name)} bounds `sigmas`, which is unset. Set it to karras.")
        if self.sigmas and self.name in ("ddim", "plms"):
            raise ConfigError(f"sigmas={self.sigmas!r}: {self.name} steps along whole timesteps. Leave it out.")
        if self.sigmas == "lu" and self.name not in _DPMPP:
            raise ConfigError(f"sigmas='lu' is for {', '.join(_DPMPP)}, not {self.name}. Set it to karras.")
        self._check_end()

    def _check_end(self) -> None:
        """Checks the settings of the last noise levels."""
        if self.final == "min" and self.name in ("heun", "euler_ancestral", "lcm"):
            raise ConfigError(f"final='min': {self.name} always ends without noise. Leave it out.")
        if self.final == "min" and self.name == "unipc" and self.sigmas:
            raise ConfigError(f"final='min': unipc ends at the last level of sigmas={self.sigmas!r}. Leave it out.")
        if self.terminal is not None and self.steps == 1:
            raise ConfigError(f"terminal={self.terminal} is the last of several times. Take more than one step.")

    def changed(self, settings: Mapping[str, Any]) -> "SamplerConfig":
        """Returns a copy with some settings changed; another sampler keeps only the spacing, as in diffusers.

        lcm has a spacing of its own, and takes `LCM_STEPS` steps unless `settings` has another number.

        Raises:
          ConfigError: the settings do not fit each other.
        """
        current = dict(to_mapping(self))
        if settings.get("name", self.name) != self.name:
            kept = {name: current[name] for name in ("spacing", "steps_offset")}
            current = {"guidance": current["guidance"]}
            current |= {"steps": LCM_STEPS} if settings["name"] == "lcm" else kept
        if settings.get("spacing", "leading") != "leading":
            current.pop("steps_offset", None)
        return parse(SamplerConfig, {**current, **settings}, path="sampler")

    @property
    def skipped_steps(self) -> int:
        """Number of first steps that `strength` skips on a schedule of betas."""
        return self.steps - int(self.steps * self.strength)

    @property
    def order(self) -> int:
        """Number of predictions that a step of DPM-Solver++ combines."""
        return 3 if self.name.startswith("dpmpp_3m") else 2


@dataclass(frozen=True)
class Table:
    """A sampler as defined in the module's docstring.

    Attributes:
      rows: [rows, 5 + history], of timestep, p, q, a, n and the coefficients b.
      start: standard deviation of the initial noise.
      alphas, sigmas: [rows + 1], coefficients of image and noise at each row and at the end.
    """

    rows: np.ndarray
    start: float
    alphas: np.ndarray
    sigmas: np.ndarray


def levels_of(schedule: Schedule, sampler: SamplerConfig) -> Levels:
    """Returns the noise levels of a sampler. The times of a flow are equally spaced and then shifted.

    A `strength` below 1 omits the first levels.

    Raises:
      ConfigError: the schedule has fewer steps, or does not support a setting.
    """
    if isinstance(schedule, FlowConfig):
        if sampler.spacing not in (None, "linspace"):
            raise ConfigError(
                f"spacing={sampler.spacing!r} chooses among the whole timesteps of a schedule of betas; this model was "
                "trained by flow matching, whose steps are equal in time. Leave it out, or take linspace."
            )
        if sampler.name == "plms" or sampler.final == "min":
            raise ConfigError(
                f"name={sampler.name!r} and final={sampler.final!r}: plms and a last level above 0 are for schedules "
                "of betas; this model was trained by flow matching. Take euler, heun or dpmpp_2m."
            )
        if changed_fields(sampler, ("timestep_scaling",)):
            raise ConfigError(
                f"timestep_scaling={sampler.timestep_scaling} is for schedules of betas. The velocity of a flow leads "
                "to the image itself at time 0. Leave it out."
            )
        if sampler.name == "unipc" and sampler.sigmas is not None:
            raise ConfigError(f"sigmas={sampler.sigmas!r}: unipc divides a flow into equal times. Leave it out.")
        # diffusers rounds the number of skipped steps down for flows, and the number of steps otherwise.
        return flow_levels(schedule, sampler).since(int(sampler.steps - sampler.steps * sampler.strength))
    if sampler.name == "lcm" and sampler.sigmas is not None:
        raise ConfigError(f"sigmas={sampler.sigmas!r}: lcm takes timesteps of its solver. Leave it out.")
    if sampler.terminal is not None:
        raise ConfigError(f"terminal={sampler.terminal} is the last time of a flow; the model has a schedule of betas.")
    return schedule_levels(schedule, sampler).since(sampler.skipped_steps)


def table_of(sampler: SamplerConfig, levels: Levels, prediction: Prediction) -> Table:
    """Computes the table of a sampler for its noise levels and a denoiser that predicts `prediction`.

    Raises:
      ConfigError: the first level is pure noise, from which a prediction of noise cannot recover the image.
    """
    if prediction == "epsilon" and not levels.alphas.all():
        raise ConfigError(
            "The first timestep is pure noise, where a prediction of noise has no image; train v instead."
        )
    if sampler.name == "plms":
        rows = _plms(levels, prediction)
    else:
        rows = [row for step in range(len(levels.timesteps)) for row in _of_step(sampler, levels, step, prediction)]
    width = max(map(len, rows))
    table = np.array([row + [0.0] * (width - len(row)) for row in rows])
    # Row by row: a timestep's row may come twice.
    places = [int(np.flatnonzero(levels.timesteps == timestep)[0]) for timestep in table[:, 0]]
    alphas, sigmas = np.append(levels.alphas[places], 1.0), np.append(levels.sigmas[places], 0.0)
    return Table(table, levels.start, alphas, sigmas)


def _of_step(sampler: SamplerConfig, levels: Levels, step: int, prediction: Prediction) -> list[list[float]]:
    """Lists the rows of one step, each timestep, p, q, a, n and b."""

    def row(level: int, a: float, *b: float, noise: float = 0.0) -> list[float]:
        expected = image_coefficients(prediction, levels.alphas[level], levels.sigmas[level])
        return [levels.timesteps[level], *expected, a, noise, *b]

    coefficients, noise = [*_euler(levels, step)], 0.0
    # A step that ends without noise is Euler's, which is exact; corrections would divide by zero.
    ends = not levels.next_sigmas[step]
    match sampler.name:
        case "heun" if not ends:
            return [row(step, *coefficients), row(step + 1, 1.0, *_heun_correction(levels, step))]
        case "ddim" if sampler.eta and not ends:
            *coefficients, noise = _ddim(levels, step, sampler.eta)
        case "euler_ancestral" if not ends:
            *coefficients, noise = _ancestral(levels, step)
        case "dpmpp_2m" | "dpmpp_3m" | "dpmpp_2m_sde" | "dpmpp_3m_sde" if not ends:
            a, b, noise = _dpmpp(sampler, levels, step)
            coefficients = [a, *b]
        case "unipc" if not ends:
            a, b = _unipc(sampler, levels, step)
            coefficients = [a, *b]
        case "lcm":
            *coefficients, noise = _lcm(sampler, levels, step, prediction)
    return [row(step, *coefficients, noise=noise)]


def image_coefficients(prediction: Prediction, alpha: Any, sigma: Any) -> tuple[Any, Any]:
    """Returns p and q of the image d = p x + q m, for x = alpha d + sigma e."""
    match prediction:
        case "epsilon":
            return 1.0 / alpha, -sigma / alpha
        case "v":  # alpha^2 + sigma^2 = 1
            return alpha, -sigma
        case "flow":  # alpha + sigma = 1
            return 1.0, -sigma


def _euler(levels: Levels, step: int) -> tuple[float, float]:
    """Returns a and b."""
    ratio = levels.next_sigmas[step] / levels.sigmas[step]
    return ratio, levels.next_alphas[step] - levels.alphas[step] * ratio


def _ddim(levels: Levels, step: int, eta: float) -> tuple[float, float, float]:
    """Returns a, b and n; n is the part of the next level's noise that is new."""
    alpha, next_alpha, next_sigma = levels.alphas[step], levels.next_alphas[step], levels.next_sigmas[step]
    noise = eta * next_sigma / levels.sigmas[step] * np.sqrt(1.0 - (alpha / next_alpha) ** 2)
    a = np.sqrt(next_sigma**2 - noise**2) / levels.sigmas[step]
    return a, next_alpha - alpha * a, noise


def _ancestral(levels: Levels, step: int) -> tuple[float, float, float]:
    """Returns a, b and n: an Euler step below the next noise level, and new noise up to that level."""
    ratio = levels.sigmas[step] / levels.scales[step]
    next_scale = levels.next_scales[step]
    next_ratio = levels.next_sigmas[step] / next_scale
    noise = np.sqrt(next_ratio**2 * (ratio**2 - next_ratio**2) / ratio**2)
    r = np.sqrt(next_ratio**2 - noise**2) / ratio
    # y' = r y + (1 - r) d + noise z, in the scale of x, where a flow's d has scale 1 as well.
    a = next_scale / levels.scales[step] * r
    return a, levels.next_alphas[step] - levels.alphas[step] * a, next_scale * noise


def _heun_correction(levels: Levels, step: int) -> tuple[float, float]:
    """Returns b of the row after Euler's: the mean of the slopes at both ends, (y - d') / s and (y' - d) / s'.

    As Euler's y' is on the line from y to d', their mean leads to y' + (1 - r) / (2 r) (d - d') with r = s' / s.
    """
    next_scale = levels.next_scales[step]
    ratio = (levels.next_sigmas[step] * levels.scales[step]) / (next_scale * levels.sigmas[step])
    change = next_scale * (1.0 - ratio) / (2.0 * ratio)
    return change, -change


def _dpmpp(sampler: SamplerConfig, levels: Levels, step: int) -> tuple[float, np.ndarray, float]:
    """Returns a, b and n: integrates a polynomial through the last images, in log(alpha / sigma)."""
    with np.errstate(divide="ignore"):  # -inf for pure noise, which makes the slope from there 0
        now, before, earlier = (
            np.log(levels.alphas[at] / levels.sigmas[at]) for at in (step, max(step - 1, 0), max(step - 2, 0))
        )
    alpha, sigma = levels.next_alphas[step], levels.next_sigmas[step]
    h = np.log(alpha / sigma) - now
    noisy = sampler.name.endswith("sde")
    # Twice as far with noise: exp(-2 h) in the place of exp(-h).
    reach = 2.0 * h if noisy else h
    left = np.expm1(-reach)
    a = sigma / levels.sigmas[step] * (np.exp(-h) if noisy else 1.0)
    b = np.array([-alpha * left, 0.0, 0.0])
    order = _order(sampler, levels, step)
    if order > 1:
        ahead = (now - before) / h
        slope = np.array([1.0, -1.0, 0.0]) / ahead
        if order == 2:
            midpoint = sampler.correction == "midpoint"
            b += alpha * (-0.5 * left if midpoint else left / reach + 1.0) * slope
        else:
            further = (before - earlier) / h
            bend = (slope - np.array([0.0, 1.0, -1.0]) / further) / (ahead + further)
            slope = slope + ahead * bend
            # diffusers subtracts the half with noise, too, where the term does not vanish for small steps.
            half = -0.5 if noisy else 0.5
            b += alpha * (left / reach + 1.0) * slope - alpha * ((left + reach) / reach**2 - half) * bend
    return a, b, sigma * np.sqrt(-left) if noisy else 0.0


def _order(sampler: SamplerConfig, levels: Levels, step: int) -> int:
    """Number of images that a step of DPM-Solver++ combines; the first steps have fewer."""
    order, steps = min(sampler.order, step + 1), len(levels.timesteps)
    few = sampler.lower_order_final and sampler.steps < _FEW_STEPS
    if step == steps - 1 and (few or sampler.euler_at_final):
        return 1
    return min(order, 2) if step == steps - 2 and few else order


def _unipc(sampler: SamplerConfig, levels: Levels, step: int) -> tuple[float, np.ndarray]:
    """Returns a and b: corrects the last step by this row's prediction, then takes a step from there.

    A corrected x differs from the x of the last row's step by a sum of images, as both start from the same x. So the
    table needs no earlier x: x' = r (x + sum_i c_i h_i) + sum_i b_i h_i with r = sigma' / sigma.
    """
    _, b = _unipc_step(sampler, levels, step)
    ratio = levels.next_sigmas[step] / levels.sigmas[step]
    if step == 0:
        return ratio, b
    corrected, predicted = _unipc_step(sampler, levels, step - 1)
    # In the last row's history, every image was one place earlier.
    return ratio, b + ratio * (corrected - np.roll(predicted, 1))


def _unipc_step(sampler: SamplerConfig, levels: Levels, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients of the images in a step's result.

    Returns:
      [3] of a corrected step, which begins with the image at its end, and [3] of a predicted step. Both lack r x.
    """
    logs = [np.log(levels.alphas[at] / levels.sigmas[at]) for at in (step, max(step - 1, 0))]
    alpha, sigma = levels.next_alphas[step], levels.next_sigmas[step]
    h = np.log(alpha / sigma) - logs[0]
    left = np.expm1(-h)  # both B(h) = e^-h - 1 and the weight of the first image
    first = left / -h - 1.0
    predicted, corrected = np.array([-alpha * left, 0.0, 0.0]), np.array([0.0, -alpha * left, 0.0])
    # Differences between the image at the step's end and its first image, and between the previous and the first.
    to_end, to_before = np.array([1.0, -1.0, 0.0]), np.array([0.0, -1.0, 1.0])
    steps = len(levels.timesteps)
    if min(step + 1, steps - step if sampler.lower_order_final else 2) < 2:
        return corrected - alpha * left * 0.5 * to_end, predicted
    ratio = (logs[1] - logs[0]) / h
    second = first / -h - 0.5
    before, end = np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], [first / left, 2.0 * second / left])
    corrected -= alpha * left * (before * to_before / ratio + end * to_end)
    predicted -= alpha * left * 0.5 * np.roll(to_before, -1) / ratio
    return corrected, predicted


def _lcm(sampler: SamplerConfig, levels: Levels, step: int, prediction: Prediction) -> tuple[float, float, float]:
    """Returns a, b and n: the consistency function c_skip x + c_out d, with noise of the next level."""
    # The image of a flow, x - sigma v, is x at time 0 without a boundary condition.
    is_flow = prediction == "flow"
    skip, out = (0.0, 1.0) if is_flow else boundary_scales(levels.timesteps[step], sampler.timestep_scaling)
    return levels.next_alphas[step] * skip, levels.next_alphas[step] * out, levels.next_sigmas[step]


def _plms(levels: Levels, prediction: Prediction) -> list[list[float]]:
    """Lists the rows of PLMS, whose history consists of predictions: p = 0 and q = 1.

    The first step runs twice, the second time with the mean of the predictions at both of its ends. As in diffusers,
    the prediction at its end is then recomputed, and the previous one is dropped.
    """

    def row(level: int, timestep: float, *weights: float) -> list[float]:
        now = levels.alphas[level], levels.sigmas[level], levels.next_alphas[level], levels.next_sigmas[level]
        a, b = transfer_coefficients(prediction, *now)
        return [timestep, 0.0, 1.0, a, 0.0, *(b * weight for weight in weights)]

    timesteps = levels.timesteps
    first = row(0, timesteps[0], 1.0)
    if len(timesteps) == 1:
        return [first]
    b = first[FIXED_COLUMNS]
    # x before the first step is (x - b h_1) / a, and a cancels.
    again = [timesteps[1], 0.0, 1.0, 1.0, 0.0, 0.5 * b, 0.5 * b - b]
    weights = [(1.5, 0.0, -0.5), (23 / 12, -16 / 12, 0.0, 5 / 12), (55 / 24, -59 / 24, 37 / 24, 0.0, -9 / 24)]
    later = (55 / 24, -59 / 24, 37 / 24, -9 / 24)
    following = [
        row(step, timesteps[step], *(weights[step - 1] if step <= len(weights) else later))
        for step in range(1, len(timesteps))
    ]
    return [first, again, *following]


def transfer_coefficients(
    prediction: Prediction, alpha: Any, sigma: Any, next_alpha: Any, next_sigma: Any
) -> tuple[Any, Any]:
    """Returns a and b of DDIM's step, with a prediction in the place of the image."""
    ratio = next_sigma / sigma
    to_image = next_alpha - alpha * ratio
    p, q = image_coefficients(prediction, alpha, sigma)
    return ratio + to_image * p, to_image * q


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inpainting:
    """Images that sampling changes only inside a mask.

    Attributes:
      images: images or latents, the source of the unmasked part.
      mask: 1 for pixels to generate, 0 for pixels to preserve.
    """

    images: Images
    mask: Float[Array, "batch *frames height width 1"]


def sample(
    denoise: Callable[..., Images],
    table: Table,
    noise: Images,
    *,
    keys: Key[Array, " images"],
    start: Images | None = None,
    inpainting: Inpainting | None = None,
    control_scales: Float[Array, " rows"] | None = None,
) -> Images:
    """Runs a sampler from noise to images.

    Args:
      denoise: (noisy images, timestep) -> prediction.
      noise: normal noise in the shape of the images.
      keys: PRNG key of each image, for the noise that rows add. An image does not depend on the rest of its batch. The
        initial noise may use the same keys, because each row folds in its number.
      start: initial images, which get noise; None starts from pure noise.
      inpainting: after each row, its images replace the unmasked part, with the noise level of the row.
      control_scales: scale of a ControlNet's residuals in each row, a third argument of `denoise`; None without.
    """
    # Known before tracing, so deterministic samplers generate no random numbers.
    adds_noise = bool(table.rows[:, FIXED_COLUMNS - 1].any())
    depth = table.rows.shape[1] - FIXED_COLUMNS

    def step(carry: tuple[Images, Sequence[Images]], row: tuple[Array, ...]) -> tuple[Any, None]:
        (x, before), ((timestep, p, q, a, n, *b), alpha, sigma, number, *scale) = carry, row
        history = [p * x + q * denoise(x, timestep, *scale), *before]
        following = a * x + sum(weight * each for weight, each in zip(b, history, strict=True))
        if adds_noise:
            row_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
            following += n * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(row_keys)
        if inpainting is not None:
            noisy = alpha * inpainting.images + sigma * noise
            following = inpainting.mask * following + (1.0 - inpainting.mask) * noisy
        return (following, history[:-1]), None

    # float32 only here: the coefficients are differences of close numbers, so NumPy computes them in float64.
    alphas, sigmas = (jnp.asarray(each, jnp.float32) for each in (table.alphas, table.sigmas))
    rows = (jnp.asarray(table.rows, jnp.float32), alphas[1:], sigmas[1:], jnp.arange(len(table.rows)))
    if control_scales is not None:
        rows = (*rows, jnp.asarray(control_scales, jnp.float32))
    x = table.start * noise if start is None else alphas[0] * start + sigmas[0] * noise
    # In the first rows the coefficients of the history are 0, so its initial values do not matter.
    (images, _), _ = jax.lax.scan(step, (x, [jnp.zeros_like(noise)] * (depth - 1)), rows)
    return images


def guided(
    denoiser: Denoiser,
    condition: Condition,
    *,
    images: int,
    guidance: float | Float[Array, "images ..."] | Callable[[Array], Array],
    rescale: float = 0.0,
) -> Callable[..., Predicted]:
    """Returns the guided prediction for a number of images with `condition`, for `sample`; see `SamplerConfig`.

    The timestep and the guidance are common to all images or given for each, and the guidance may be a function of the
    timestep. The optional third argument of the prediction is the scale of a ControlNet's residuals.
    """

    def scaled(condition: Condition, scale: Float[Array, ""] | None, rows: int) -> Condition:
        return condition if scale is None else {**condition, "control_scale": jnp.broadcast_to(scale, (rows,))}

    def plain(x: Images, timestep: Float[Array, "*images"], scale: Float[Array, ""] | None = None) -> Predicted:
        return denoiser(x, jnp.broadcast_to(timestep, (images,)), scaled(condition, scale, images))

    def strengthened(x: Images, timestep: Float[Array, "*images"], scale: Float[Array, ""] | None = None) -> Predicted:
        # One call with twice as many rows runs both predictions.
        timesteps = jnp.tile(jnp.broadcast_to(timestep, (images,)), 2)
        predictions = denoiser(jnp.concatenate([x, x]), timesteps, scaled(both, scale, 2 * images))
        with_condition, without = jnp.split(predictions, 2)
        weight = guidance(timestep) if callable(guidance) else guidance
        predicted = without + weight * (with_condition - without)
        axes = tuple(range(1, x.ndim))
        ratio = with_condition.std(axes, keepdims=True) / predicted.std(axes, keepdims=True)
        return predicted * (1.0 - rescale + rescale * ratio) if rescale else predicted

    if not condition or (isinstance(guidance, float) and guidance == 1.0):
        return plain
    without = denoiser.unconditional(condition)
    both = {name: jnp.concatenate([array, without[name]]) for name, array in positive(condition).items()}
    return strengthened
