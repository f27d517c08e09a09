"""Sampling of a flow by a stochastic differential equation, whose images have the same distribution as the flow's.

A flow's image x at the time sigma moves by dx = v dsigma. With noise of the rate g(sigma) it moves by

    dx = (v + g^2 / (2 sigma) (x + (1 - sigma) v)) dsigma + g dw, backwards in time

and the distribution of x at each time stays the same, because x + (1 - sigma) v is the expected noise e, and -e / sigma
the gradient of the log-density. A step from sigma to sigma' = sigma - d samples N(a x + b v, s^2) with

    a = 1 - d g^2 / (2 sigma),    b = -d (1 + g^2 (1 - sigma) / (2 sigma)),    s = g sqrt(d)

g = noise_level sqrt(sigma / (1 - sigma)) as in Liu et al., Flow-GRPO, 2025 (arXiv:2505.05470), equations 8 and 9. It is
infinite at sigma = 1, where the second level takes the place of sigma in its denominator, as in the authors' code.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Float32, Float64

from stack_train.diffusion.levels import Levels

__all__ = ["sample_steps", "step_coefficients"]

Images = Float32[np.ndarray, "images *shape"]


def step_coefficients(levels: Levels, *, noise_level: float) -> Float64[np.ndarray, "steps 3"]:
    """Computes a, b and s of each step; a noise level of 0 gives the Euler steps of the flow.

    The last step adds no noise, because the noise would remain in the image.

    Args:
      levels: noise levels of a flow.
    """
    sigmas, distance = levels.sigmas, levels.sigmas - levels.next_sigmas
    pole = np.where(sigmas < 1.0, sigmas, sigmas[min(1, len(sigmas) - 1)])
    with np.errstate(divide="ignore", invalid="ignore"):  # a single step, from pure noise, is a last step
        rate = np.where(levels.next_sigmas > 0.0, noise_level**2 * sigmas / (1.0 - pole), 0.0)
    half = rate / (2.0 * sigmas)
    return np.stack(
        [1.0 - distance * half, -distance * (1.0 + half * (1.0 - sigmas)), np.sqrt(rate * distance)], axis=1
    )


def sample_steps(
    predict: Callable[[Images, float], Images],
    levels: Levels,
    coefficients: Float[np.ndarray, "steps 3"],
    noise: Images,
    *,
    rng: np.random.Generator,
) -> Iterator[tuple[Images, Images, Images]]:
    """Samples images on the host, except for the denoiser; yields x, v and x' of each step.

    Args:
      predict: (images, timestep) -> v.
      levels, coefficients: the steps; see `step_coefficients`.
      noise: the initial noise.
      rng: generator of the noise of the steps.
    """
    x = noise
    for timestep, (a, b, s) in zip(levels.timesteps, coefficients, strict=True):
        velocity = predict(x, float(timestep))
        after = np.float32(a) * x + np.float32(b) * velocity
        if s:
            after += np.float32(s) * rng.standard_normal(x.shape, np.float32)
        yield x, velocity, after
        x = after
