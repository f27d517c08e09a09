"""Noise levels of samplers: the timesteps that a sampler visits, and the noise that remains at each.

They match diffusers' schedulers, in which the rounding of timesteps depends on the sampler.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.denoiser import TIMESTEPS
from stack_train.diffusion.noise import FlowConfig, NoiseConfig

__all__ = ["Levels", "SigmaSpacing", "boundary_scales", "flow_levels", "schedule_levels", "solver_timesteps"]

SigmaSpacing: TypeAlias = Literal["karras", "exponential", "beta", "lu"]

_RHO = 7.0  # of Karras et al.
_BETA = 0.6  # both parameters of the beta distribution (Lee et al., 2024, arXiv:2407.12173)
_FROM_NOISE = 1e-6  # distance of unipc's first time from pure noise
_INTEGER = ("ddim", "plms", "lcm")  # samplers that step between integer timesteps of the schedule
_SIGMA_DATA = 0.5  # standard deviation of the data in the boundary condition, fixed in LCM


@dataclass(frozen=True)
class Levels:
    """The noise levels of a sampler in descending order, [steps] each.

    Attributes:
      timesteps: timestep inputs of the denoiser.
      alphas, sigmas: coefficients of image and noise at the start of each step.
      next_alphas, next_sigmas: coefficients at the end of each step.
      scales, next_scales: k; for a constant d, y = x / k moves along a straight line with s = sigma / k as its time.
      start: standard deviation of the initial noise.
    """

    timesteps: np.ndarray
    alphas: np.ndarray
    sigmas: np.ndarray
    next_alphas: np.ndarray
    next_sigmas: np.ndarray
    scales: np.ndarray
    next_scales: np.ndarray
    start: float = 1.0

    def since(self, step: int) -> "Levels":
        """Returns a copy without the first `step` levels."""
        found = {each.name: getattr(self, each.name)[step:] for each in fields(self) if each.name != "start"}
        return Levels(**found, start=self.start)


def solver_timesteps(schedule: NoiseConfig, solver_steps: int) -> np.ndarray:
    """Returns the timesteps that consistency distillation visits, int64[solver_steps] in ascending order."""
    return np.arange(1, solver_steps + 1) * (schedule.steps // solver_steps) - 1


def boundary_scales(timesteps: Any, scaling: float) -> tuple[Any, Any]:
    """Returns c_skip and c_out of a consistency function c_skip x + c_out d, which is x at the timestep 0.

        c_skip = s^2 / ((k t)^2 + s^2),  c_out = k t / sqrt((k t)^2 + s^2)

    with k = `scaling` and s = 0.5. Source: Luo et al., LCM, 2023 (arXiv:2310.04378), appendix.
    """
    scaled = scaling * timesteps
    return _SIGMA_DATA**2 / (scaled**2 + _SIGMA_DATA**2), scaled / np.sqrt(scaled**2 + _SIGMA_DATA**2)


def flow_levels(schedule: FlowConfig, sampler: Any) -> Levels:
    """Returns the levels of a flow for a `SamplerConfig`.

    Raises:
      ConfigError: lcm has more steps than its solver.
    """
    _check_solver(sampler)
    last = 1.0 / sampler.steps
    if sampler.spacing == "linspace":
        last = schedule.lowest_time or schedule.shifted(1.0 / TIMESTEPS)
    unipc = sampler.name == "unipc"
    times = np.linspace(1.0, 1.0 / TIMESTEPS if unipc else last, sampler.steps + unipc)
    sigmas = schedule.shifted(times[: sampler.steps])
    if sampler.terminal is not None:
        # In the order of diffusers: truncated timesteps depend on the last bit.
        sigmas = 1.0 - (1.0 - sigmas) / ((1.0 - sigmas[-1]) / (1.0 - sampler.terminal))
    if sampler.sigmas is not None:
        sigmas = _spaced(sampler, sigmas[0], sigmas[-1])
    timesteps = sigmas * TIMESTEPS
    if unipc:
        # As in diffusers: multistep formulas divide by alpha, timesteps are truncated, and sigma is rounded to float32,
        # which makes 1 - sigma of the first level 1% larger.
        sigmas = np.where(np.abs(sigmas - 1.0) < _FROM_NOISE, sigmas - _FROM_NOISE, sigmas)
        timesteps = np.floor(sigmas * TIMESTEPS)
        sigmas = sigmas.astype(np.float32).astype(np.float64)
    after = np.append(sigmas[1:], 0.0)
    ones = np.ones_like(sigmas)
    return Levels(timesteps, 1.0 - sigmas, sigmas, 1.0 - after, after, ones, ones)


def schedule_levels(schedule: NoiseConfig, sampler: Any) -> Levels:
    """Returns the levels of a schedule of betas for a `SamplerConfig`.

    Raises:
      ConfigError: the schedule has fewer steps, or lcm has more steps than its solver.
    """
    _check_solver(sampler)
    steps, integer = sampler.steps, sampler.name in _INTEGER
    # Multistep samplers divide the schedule into one more step, and leave the last one out.
    multistep = _is_multistep(sampler)
    if steps + multistep > schedule.steps:
        raise ConfigError(f"{steps} steps are more than the {schedule.steps} of the noise schedule. Take fewer.")
    alphas, sigmas = schedule.alphas_and_sigmas()
    if not alphas[-1] and not integer:
        alphas[-1] = 2.0**-12  # as in diffusers, where other samplers would divide by zero
        sigmas[-1] = np.sqrt(1.0 - alphas[-1] ** 2)
    if sampler.name == "lcm":
        return _lcm_levels(schedule, sampler, alphas, sigmas)
    timesteps = _timesteps(schedule, sampler)
    if integer:
        return _integer_levels(schedule, sampler, timesteps, alphas, sigmas)
    every = sigmas / alphas
    ratios = np.interp(timesteps, np.arange(schedule.steps), every)  # timesteps may be fractional
    if sampler.sigmas is not None:
        first, last = (every[-1], every[0]) if multistep else (ratios[0], ratios[-1])
        ratios = _spaced(sampler, first, last)
        timesteps = np.interp(np.log(ratios), np.log(every), np.arange(schedule.steps))
        if multistep:
            whole = schedule.betas != "cosine" or sampler.name == "unipc"
            rounds = sampler.sigmas in ("karras", "lu") and whole
            # diffusers truncates what float32 may have rounded down: the schedule's last timestep becomes 998.
            timesteps = np.round(timesteps) if rounds else np.floor(timesteps - 1e-4).clip(0.0)
    after = np.append(ratios[1:], every[0] if sampler.final == "min" else 0.0)
    # alpha from sigma / alpha, since alpha^2 + sigma^2 = 1.
    alphas, next_alphas = (1.0 / np.sqrt(1.0 + each**2) for each in (ratios, after))
    # diffusers starts these three from sigma z, not sqrt(1 + sigma^2) z, unless the spacing is leading.
    scaled = sampler.name in ("euler", "euler_ancestral", "heun") and sampler.spacing != "leading"
    start = float(ratios.max() * alphas[0]) if scaled else 1.0
    sigmas, next_sigmas = ratios * alphas, after * next_alphas
    return Levels(timesteps, alphas, sigmas, next_alphas, next_sigmas, alphas, next_alphas, start)


def _timesteps(schedule: NoiseConfig, sampler: Any) -> np.ndarray:
    """Returns the timesteps of a spacing in descending order."""
    steps, total = sampler.steps, schedule.steps
    parts = steps + _is_multistep(sampler)
    match sampler.spacing or ("leading" if sampler.name == "plms" else "linspace"):
        case "leading":
            timesteps = (np.arange(parts) * (total // parts))[::-1][:steps] + float(sampler.steps_offset)
        case "trailing":
            timesteps = np.round(np.arange(total, 0, -total / steps)[:steps]) - 1.0
        case _:
            timesteps = np.linspace(0.0, total - 1, parts)[::-1][:steps] if parts > 1 else np.array([total - 1.0])
            timesteps = timesteps if sampler.name in ("euler", "euler_ancestral", "heun") else np.round(timesteps)
    if timesteps[0] > total - 1:
        raise ConfigError(
            f"steps_offset={sampler.steps_offset} leads to timestep {timesteps[0]:.0f}; the schedule ends at "
            f"{total - 1}. Reduce it."
        )
    return timesteps


def _is_multistep(sampler: Any) -> bool:
    return sampler.name.startswith(("dpmpp", "unipc"))


def _integer_levels(
    schedule: NoiseConfig, sampler: Any, timesteps: np.ndarray, alphas: np.ndarray, sigmas: np.ndarray
) -> Levels:
    """Returns the levels of samplers that step by a fixed number of timesteps.

    Because of rounding, the end of a step may differ from the start of the next step.
    """
    places = timesteps.astype(np.int64)
    after = places - schedule.steps // sampler.steps
    final_alpha, final_sigma = (alphas[0], sigmas[0]) if sampler.final == "min" else (1.0, 0.0)
    next_alphas = np.where(after < 0, final_alpha, alphas[after.clip(0)])
    next_sigmas = np.where(after < 0, final_sigma, sigmas[after.clip(0)])
    levels = alphas[places], sigmas[places], next_alphas, next_sigmas
    return Levels(timesteps, *levels, alphas[places], next_alphas)


def _check_solver(sampler: Any) -> None:
    """Raises a ConfigError if lcm has more steps than the solver has timesteps."""
    if sampler.name == "lcm" and sampler.steps > sampler.solver_steps:
        raise ConfigError(
            f"steps={sampler.steps} is more than solver_steps={sampler.solver_steps}, the timesteps that the model was "
            "distilled on, of which lcm takes a part. Take fewer steps, such as 4."
        )


def _lcm_levels(schedule: NoiseConfig, sampler: Any, alphas: np.ndarray, sigmas: np.ndarray) -> Levels:
    """Returns the levels of equally spaced indices into the timesteps of the solver, from its last one."""
    if sampler.solver_steps > schedule.steps:
        raise ConfigError(
            f"solver_steps={sampler.solver_steps} is more than the {schedule.steps} of the noise schedule. Reduce it."
        )
    indices = np.floor(np.linspace(0, sampler.solver_steps, sampler.steps, endpoint=False)).astype(np.int64)
    places = solver_timesteps(schedule, sampler.solver_steps)[::-1][indices]
    next_alphas, next_sigmas = np.append(alphas[places[1:]], 1.0), np.append(sigmas[places[1:]], 0.0)
    levels = alphas[places], sigmas[places], next_alphas, next_sigmas
    return Levels(places.astype(np.float64), *levels, alphas[places], next_alphas)


def _spaced(sampler: Any, first: float, last: float) -> np.ndarray:
    """Returns noise to image ratios, or times of a flow, from the first to the last."""
    high, low = sampler.sigma_max or first, sampler.sigma_min or last
    ramp = np.linspace(0.0, 1.0, sampler.steps)
    match sampler.sigmas:
        case "karras":
            top, bottom = high ** (1 / _RHO), low ** (1 / _RHO)
            return (top + ramp * (bottom - top)) ** _RHO
        case "beta":
            from scipy.stats import beta  # takes long to import

            return low + beta.ppf(1.0 - ramp, _BETA, _BETA) * (high - low)
        case _:  # exponential; "lu" with its rho of 1 is the same
            return np.exp(np.log(high) + ramp * (np.log(low) - np.log(high)))
