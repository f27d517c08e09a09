"""What a denoiser is, and what objectives and samplers ask of it."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = [
    "TIMESTEPS",
    "Condition",
    "Denoiser",
    "Images",
    "ImagesConfig",
    "Predicted",
    "condition_of",
    "image_tokens",
    "predicted_halfway",
]

TIMESTEPS = 1000.0
"""The timestep of pure noise: a flow's time 1, or one past the last step of a discrete schedule of 1000."""

Images = Float[Array, "batch height width channels"]
"""Images in [-1, 1], or latents of them."""

Predicted = Float[Array, "batch height width predicted"]
"""What a denoiser says; some say more channels than images have, such as variances."""

Condition = Mapping[str, jax.Array]
"""What images are to show, by the names that the data gives it: "labels"; every array leads with [batch, ...]."""


@runtime_checkable
class Denoiser(Protocol):
    """A model that predicts, from a noisy image, the noise in it or another mixture of noise and image."""

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        """Returns the prediction, in float32.

        Args:
          timesteps: how noisy each image is, from 0 to `TIMESTEPS`.
        """
        ...

    def unconditional(self, condition: Condition) -> Condition:
        """The condition that asks for any image, in the shapes of `condition`."""
        ...


@runtime_checkable
class ImagesConfig(Protocol):
    """The config of a model of images, which data and samplers are compared with.

    Attributes:
      image_size: pixels of a side, or of latents' sides.
      classes: labels that the model knows; 0 if it takes none.
    """

    image_size: int
    channels: int
    classes: int


def condition_of(batch: Mapping[str, jax.Array]) -> Condition:
    """The condition in a batch: all that is neither "images" nor "weights"."""
    return {name: array for name, array in batch.items() if name not in ("images", "weights")}


def image_tokens(model: Any, height: int, width: int) -> int:
    """Returns the number of patches of an image; a model without `config.patch` has one of each pixel.

    Args:
      height, width: of the images that the denoiser sees, which may be latents.
    """
    patch = getattr(getattr(model, "config", None), "patch", 1)
    return (height // patch) * (width // patch)


def predicted_halfway(model: Denoiser, batch: Mapping[str, jax.Array]) -> Predicted:
    """What a denoiser predicts of a batch, as if its images were half noise."""
    images = batch["images"]
    return model(images, jnp.full(images.shape[:1], TIMESTEPS / 2), condition_of(batch))
