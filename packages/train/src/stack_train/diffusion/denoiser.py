"""Interfaces between denoisers, objectives and samplers."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = [
    "LOSS_WEIGHTS",
    "TIMESTEPS",
    "Condition",
    "Denoiser",
    "Images",
    "ImagesConfig",
    "LimitsSize",
    "Predicted",
    "VideosConfig",
    "condition_of",
    "image_tokens",
    "positive",
    "predicted_halfway",
    "unconditional",
]

TIMESTEPS = 1000.0
"""The timestep of pure noise: a flow's time 1, or one past the last step of a discrete schedule of 1000."""

LOSS_WEIGHTS = "loss_weights"
"""Name of the factors of the images' losses in a batch."""

Images = Float[Array, "batch *frames height width channels"]
"""Images or videos in [-1, 1], or latents of them."""

Predicted = Float[Array, "batch *frames height width predicted"]
"""What a denoiser says; some say more channels than images have, such as variances."""

Condition = Mapping[str, jax.Array]
"""What images are to show, by the names that the data gives it: "labels"; every array leads with [batch, ...].

"negative_text" is what they are not to show in place of "text", and the same holds for other names.
"""

_NEGATIVE = "negative_"


@runtime_checkable
class Denoiser(Protocol):
    """A model that predicts, from a noisy image, the noise in it or another mixture of noise and image."""

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        """Returns the prediction, in float32.

        Args:
          timesteps: noise level of each image, from 0 to `TIMESTEPS`.
        """
        ...

    def unconditional(self, condition: Condition) -> Condition:
        """The condition that asks for any image, in the names and shapes of `positive(condition)`."""
        ...


@runtime_checkable
class ImagesConfig(Protocol):
    """The config of an image model, for checks by data and samplers.

    Attributes:
      image_size: height and width of the images or latents.
      classes: number of labels; 0 for a model without labels.
    """

    image_size: int
    channels: int
    classes: int


@runtime_checkable
class VideosConfig(Protocol):
    """The config of a model of videos, which is an `ImagesConfig` as well.

    Attributes:
      frames: number of frames of the videos or latents.
    """

    frames: int


@runtime_checkable
class LimitsSize(Protocol):
    """The config of an image model that does not support all sizes that its patches divide."""

    def check_size(self, height: int, width: int) -> None:
        """Raises a ConfigError if the model does not support images or latents of this size."""
        ...


def condition_of(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the condition in a batch of arrays, or of their shapes: all except "images" and weights."""
    return {name: array for name, array in batch.items() if name not in ("images", "weights", LOSS_WEIGHTS)}


def positive(condition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the condition, or its shapes, without negative counterparts."""
    return {name: array for name, array in condition.items() if not name.startswith(_NEGATIVE)}


def unconditional(condition: Condition, *, shared: tuple[str, ...] = ()) -> Condition:
    """Replaces each array by its negative counterpart, or by 0 if it has none.

    Args:
      shared: names of arrays that are the same for both predictions.
    """
    return {
        name: array if name in shared else condition.get(_NEGATIVE + name, jnp.zeros_like(array))
        for name, array in positive(condition).items()
    }


def image_tokens(model: Any, *shape: int) -> int:
    """Returns the number of patches of an image or video; without `config.patch`, each pixel is a patch.

    Args:
      shape: (height, width) of the denoiser's input, images or latents, after the number of frames of a video.
    """
    patch = getattr(getattr(model, "config", None), "patch", 1)
    *frames, height, width = shape
    return math.prod(frames) * (height // patch) * (width // patch)


def predicted_halfway(model: Denoiser, batch: Mapping[str, jax.Array]) -> Predicted:
    """Computes a denoiser's prediction for a batch at half of the maximum timestep."""
    images = batch["images"]
    return model(images, jnp.full(images.shape[:1], TIMESTEPS / 2), condition_of(batch))
