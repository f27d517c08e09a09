"""Steps of a flow's stochastic sampler: normal distributions of the next, less noisy image.

A step from x with the predicted velocity v samples x' from N(a x + b v, s^2). The coefficients (a, b, s) come with each
step.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["step_kl", "step_logprob", "step_mean"]

Images = Float[Array, "batch *image values"]
Coefficients = Float[Array, "batch 3"]
PerImage = Float[Array, " batch"]


def step_mean(images: Images, velocity: Images, coefficients: Coefficients) -> Images:
    """Computes m = a x + b v."""
    a, b, _ = (_per_image(coefficients[:, place], images) for place in range(3))
    return a * images + b * velocity


def step_logprob(next_images: Images, mean: Images, coefficients: Coefficients) -> PerImage:
    """Computes log N(x'; m, s^2), the mean over the values of an image instead of their sum.

    A mean has the same scale for all sizes of images, and therefore one clip range fits all.
    """
    std = coefficients[:, 2]
    squares = jnp.mean(jnp.square(next_images - mean), axis=tuple(range(1, mean.ndim)))
    return -squares / (2 * jnp.square(std)) - jnp.log(std) - 0.5 * math.log(2 * math.pi)


def step_kl(mean: Images, reference_mean: Images, coefficients: Coefficients) -> PerImage:
    """Computes KL(N(m, s^2) || N(m_ref, s^2)) = (m - m_ref)^2 / (2 s^2), the mean over the values of an image.

    Source: Liu et al., Flow-GRPO, 2025 (arXiv:2505.05470), section 4.2.
    """
    squares = jnp.mean(jnp.square(mean - reference_mean), axis=tuple(range(1, mean.ndim)))
    return squares / (2 * jnp.square(coefficients[:, 2]))


def _per_image(values: PerImage, images: Images) -> Float[Array, "batch ..."]:
    return values.reshape(-1, *[1] * (images.ndim - 1))
