"""Noise schedules: the fractions of image and noise in a noisy image by timestep."""

import math
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError

__all__ = ["DynamicShift", "FlowConfig", "NoiseConfig", "Prediction", "Schedule", "Weights"]

Weights: TypeAlias = np.ndarray
"""float64[steps], a weight for each timestep."""

Prediction: TypeAlias = Literal["epsilon", "v", "flow"]
"""Prediction target of a denoiser for x = alpha x0 + sigma e: e, alpha e - sigma x0, or e - x0."""


@config
class NoiseConfig:
    """x_t = alpha_t x0 + sigma_t e, alpha_t^2 = prod_(s <= t) (1 - beta_s), sigma_t^2 = 1 - alpha_t^2, t an integer.

    Attributes:
      steps: number of timesteps.
      betas: schedule of beta: linear, linear in its square root ("scaled_linear"), or from a squared cosine alpha^2.
      beta_start, beta_end: first and last beta of the linear schedules.
      zero_snr: rescales alphas to make the last timestep pure noise, for models that predict v (Lin et al., 2023,
        arXiv:2305.08891).

    Source: Ho et al., DDPM, 2020 (arXiv:2006.11239); the cosine: Nichol and Dhariwal, 2021 (arXiv:2102.09672); the
    scaled one: Rombach et al., Latent Diffusion, 2022 (arXiv:2112.10752).
    """

    steps: PositiveInt = 1000
    betas: Literal["linear", "scaled_linear", "cosine"] = "linear"
    beta_start: NonNegativeFloat = 1e-4
    beta_end: NonNegativeFloat = 0.02
    zero_snr: bool = False

    def __post_init__(self) -> None:
        if not self.beta_start <= self.beta_end < 1.0:
            raise ConfigError(f"beta_start={self.beta_start} and beta_end={self.beta_end} must grow and end below 1.")
        if self.betas == "cosine" and (unused := changed_fields(self, ("beta_start", "beta_end"))):
            raise ConfigError(f"betas is 'cosine', so {' and '.join(unused)} would have no effect. Remove it.")

    def alphas_and_sigmas(self) -> tuple[Weights, Weights]:
        """Returns alpha_t and sigma_t for t = 0 .. steps - 1, float64."""
        # In float64, because a product of a thousand factors near 1 loses digits in float32.
        alphas = np.sqrt(np.cumprod(1.0 - self._betas()))
        if self.zero_snr:
            alphas = (alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])
        return alphas, np.sqrt(1.0 - alphas**2)

    def _betas(self) -> Weights:
        if self.betas == "cosine":
            # The offset 0.008 keeps the first betas from vanishing (Nichol and Dhariwal, section 3.2).
            bar = np.cos((np.arange(self.steps + 1) / self.steps + 0.008) / 1.008 * np.pi / 2) ** 2
            # At the end of the schedule alpha reaches 0, and a beta of 1 would be singular.
            return np.minimum(1.0 - bar[1:] / bar[:-1], 0.999)
        if self.betas == "linear":
            return np.linspace(self.beta_start, self.beta_end, self.steps)
        return np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.steps) ** 2


@config
class FlowConfig:
    """x_t = (1 - sigma) x0 + sigma e on the straight line from an image to noise; sigma is the time, shifted.

        sigma = shift t / (1 + (shift - 1) t)

    Attributes:
      shift: values above 1 move the steps of samplers towards pure noise. Larger images need more noise to be hidden.
      lowest_time: last time of samplers with linspace spacing, before the shift; None is the sigma of 1 / 1000.

    Source: Liu et al., Rectified Flow, 2022 (arXiv:2209.03003); the shift: Esser et al., 2024 (arXiv:2403.03206).
    """

    shift: PositiveFloat = 1.0
    lowest_time: PositiveFloat | None = None

    def shifted(self, times: Any) -> Any:
        """sigma of times in [0, 1], an array of NumPy or JAX."""
        return times * self.shift / (times * (self.shift - 1.0) + 1.0)


@config
class DynamicShift:
    """Shift of a flow as a function of the image size, n tokens per image.

        mu(n) = base_shift + (max_shift - base_shift) (n - base_tokens) / (max_tokens - base_tokens)
        shift = exp(mu), or mu if `curve` is "linear"

    Attributes:
      base_shift, max_shift: mu for images with `base_tokens` and with `max_tokens`; other sizes lie on the same line.
      base_tokens, max_tokens: patches per image; in FLUX.1 256 are 256 x 256 pixels, and 4096 are 1024 x 1024.
      curve: "exponential", shift = exp(mu), or "linear", shift = mu.

    It matches `use_dynamic_shifting` of diffusers' `FlowMatchEulerDiscreteScheduler`.
    """

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_tokens: PositiveInt = 256
    max_tokens: PositiveInt = 4096
    curve: Literal["exponential", "linear"] = "exponential"

    def __post_init__(self) -> None:
        if self.base_tokens >= self.max_tokens:
            raise ConfigError(f"base_tokens={self.base_tokens} is not below max_tokens={self.max_tokens}.")
        if self.curve == "linear" and min(self.base_shift, self.max_shift) <= 0.0:
            raise ConfigError(
                f"base_shift={self.base_shift} and max_shift={self.max_shift} must be positive if curve is linear."
            )

    def at(self, tokens: int) -> float:
        """Returns the shift of images of this many tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = self.base_shift + slope * (tokens - self.base_tokens)
        return math.exp(mu) if self.curve == "exponential" else mu


Schedule: TypeAlias = NoiseConfig | FlowConfig
