"""Pairs of denoisers: the first acts at high noise, and the second at low noise.

Source: Wan 2.2 of the Wan Team, whose models A14B are such pairs.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from stack_train.diffusion.denoiser import TIMESTEPS, Condition, Images, Predicted

__all__ = ["TwoDenoisers"]


class TwoDenoisers(nnx.Module):
    """A `Denoiser` for sampling, whose images all have one timestep.

    Args:
      high: denoiser of timesteps of at least `boundary` times `TIMESTEPS`.
      low: denoiser of lower timesteps, with the config of `high`.
      boundary: fraction of the timesteps.
    """

    def __init__(self, high: Any, low: Any, *, boundary: float) -> None:
        self.high, self.low, self.boundary = high, low, boundary

    @property
    def config(self) -> Any:
        """Config of both denoisers."""
        return self.high.config

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        # Only the selected denoiser is computed.
        inputs = images, timesteps, condition
        return jax.lax.cond(self.is_high(timesteps[0]), lambda: self.high(*inputs), lambda: self.low(*inputs))

    def is_high(self, timestep: Float[Array, ""]) -> Array:
        """Returns whether `high` acts at a timestep."""
        return timestep >= self.boundary * TIMESTEPS

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`."""
        return self.high.unconditional(condition)
