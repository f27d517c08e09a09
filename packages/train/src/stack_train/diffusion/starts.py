"""Initial images of sampling: latents that are changed, and first frames of videos."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from stack_core.abi.errors import GenerationError
from stack_train.diffusion.latents import Begun
from stack_train.diffusion.pipeline import Encoders
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.wan import FIRST_FRAME, IMAGE_FEATURES

__all__ = [
    "Start",
    "check_first_frame",
    "check_pixels",
    "check_start",
    "encode_first_frames",
    "encode_start",
    "first_frame_condition",
    "keep_first_frame",
]

_HALF = 127


@dataclass(frozen=True)
class Start:
    """The initial image of image-to-image sampling and inpainting, or of a video, in the size of the output.

    Attributes:
      mask: values above 127 select pixels to generate; None selects all pixels.
    """

    image: UInt8[np.ndarray, "height width channels"]
    mask: UInt8[np.ndarray, "height width"] | None = None


def check_start(start: Start | None, sampler: SamplerConfig, *, reads_mask: bool) -> None:
    """Raises a GenerationError if an inpainting model lacks a mask, or a strength an image."""
    if reads_mask and (start is None or start.mask is None):
        raise GenerationError(
            "The model fills the masked part of an image. Give an image and a mask.", parameter="mask"
        )
    if start is None and sampler.strength != 1.0:
        raise GenerationError(
            f"strength={sampler.strength} is the fraction of the steps applied to an initial image. Give an image.",
            parameter="strength",
        )


def check_first_frame(start: Start | None, sampler: SamplerConfig, *, needs_image: bool, takes_image: bool) -> None:
    """Raises a GenerationError if a model of videos needs an image, or takes none, or does not take its settings."""
    if needs_image and start is None:
        raise GenerationError("The model makes videos that begin with an image. Give an image.", parameter="image")
    if start is not None and not (needs_image or takes_image):
        raise GenerationError("The model makes videos of prompts only. Leave the image out.", parameter="image")
    if start is not None and start.mask is not None:
        raise GenerationError("A mask is for models of images, not of videos. Leave the mask out.", parameter="mask")
    if sampler.strength != 1.0:
        raise GenerationError(
            f"strength={sampler.strength} changes an image, and a video begins with its image. Leave it out.",
            parameter="strength",
        )


def check_pixels(arrays: Mapping[str, np.ndarray | None], encoders: Encoders, sides: tuple[int, ...]) -> None:
    """Raises a GenerationError if an image by name differs in size from the output.

    Args:
      sides: height and width of the latents.
    """
    factor = encoders.autoencoder.config.downsampling
    expected = tuple(side * factor for side in sides)
    for name, array in arrays.items():
        if array is not None and array.shape[:2] != expected:
            raise GenerationError(
                f"The {name} is {array.shape[1]}x{array.shape[0]} pixels; images of {expected[1]}x{expected[0]} "
                "are made. Resize it, or give another size.",
                parameter=name,
            )


def encode_start(start: Start, encoders: Encoders, sides: tuple[int, int], *, count: int, reads_mask: bool) -> Begun:
    """Encodes an initial image and its mask.

    Args:
      sides: height and width of the latents.
      count: number of images to sample.
      reads_mask: True for inpainting models.

    Raises:
      GenerationError: the image or the mask differs in size from the output.
    """
    factor = encoders.autoencoder.config.downsampling
    check_pixels({"image": start.image, "mask": start.mask}, encoders, sides)
    pixels = jnp.asarray(start.image, jnp.float32)[None] / 127.5 - 1.0
    latents = encoders.encode(pixels)
    if start.mask is None:
        return Begun(_repeat(latents, count), None, None)
    pixel_mask = jnp.asarray(start.mask > _HALF, jnp.float32)[None, :, :, None]
    # Each latent has the mask of its first pixel, as in diffusers.
    mask = pixel_mask[:, ::factor, ::factor]
    if not reads_mask:
        return Begun(_repeat(latents, count), _repeat(mask, count), None)
    # Inpainting models read the mask, and the latents of the image with grey pixels in the mask.
    extra = jnp.concatenate([mask, encoders.encode(pixels * (1.0 - pixel_mask))], axis=-1)
    return Begun(_repeat(latents, count), None, _repeat(extra, count))


def first_frame_condition(
    image: UInt8[np.ndarray, "height width channels"], encoders: Encoders, shape: tuple[int, ...], *, count: int
) -> dict[str, jax.Array]:
    """Encodes the first frame of videos.

    Args:
      shape: frames, height and width of the latents.
      count: number of videos to sample.

    Raises:
      GenerationError: the image differs in size or channels from the videos.
    """
    frames, *sides = shape
    config = encoders.autoencoder.config
    check_pixels({"image": image}, encoders, tuple(sides))
    if image.shape[-1] != config.channels:
        raise GenerationError(
            f"The image has {image.shape[-1]} channels, and the autoencoder {config.channels}. Convert the image.",
            parameter="image",
        )
    found = encode_first_frames(image[None], encoders, frames)
    return {name: _repeat(array, count) for name, array in found.items()}


def encode_first_frames(
    images: UInt8[np.ndarray, "videos height width channels"], encoders: Encoders, frames: int
) -> dict[str, jax.Array]:
    """Encodes the first frame of each video.

    The condition has its latents for denoisers that may begin with it, or else, at the size of the video, a mask and
    latents, and features if there is an image encoder.

    Args:
      frames: number of frames of the latents.
    """
    if encoders.pipeline.may_begin_with_image:
        return {FIRST_FRAME: encoders.encode(jnp.asarray(images[:, None], jnp.float32) / 127.5 - 1.0)[:, 0]}
    factor = encoders.autoencoder.config.frames_per_latent
    # Grey frames follow.
    pixels = np.zeros((len(images), (frames - 1) * factor + 1, *images.shape[1:]), np.float32)
    pixels[:, 0] = images / 127.5 - 1.0
    latents = encoders.encode(jnp.asarray(pixels))
    # The mask has one channel for each frame of a latent.
    mask = jnp.zeros((*latents.shape[:-1], factor)).at[:, 0].set(1.0)
    found = {FIRST_FRAME: jnp.concatenate([mask, latents], axis=-1)}
    if encoders.image is not None:
        found[IMAGE_FEATURES] = encoders.image(images)
    return found


def keep_first_frame(latents: Float[Array, "videos height width channels"], frames: int) -> Begun:
    """Returns the start of sampling that preserves the first frame of each video, given its latents.

    Args:
      frames: number of frames of the latents.
    """
    kept = jnp.broadcast_to(latents[:, None], (len(latents), frames, *latents.shape[1:]))
    return Begun(kept, jnp.ones_like(kept[..., :1]).at[:, 0].set(0.0), None)


def _repeat(array: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(array, (count, *array.shape[1:]))
