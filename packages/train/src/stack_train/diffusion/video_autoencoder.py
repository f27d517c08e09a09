"""Base classes of autoencoders of videos: sizes, and the computation of a video or of one chunk after another."""

import abc
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.autoencoder_kl import clipped_log_variance
from stack_train.diffusion.convolution import FrameCache, VideoFeatures

__all__ = ["AutoencoderBuild", "Latents", "VideoAutoencoder", "VideoSizes", "Videos", "map_chunks"]

Videos = Float[Array, "batch frames height width channels"]
Latents = Float[Array, "batch latent_frames latent_height latent_width latent_channels"]


class VideoSizes(abc.ABC):
    """The part of an autoencoder's config that relates the sizes of videos and latents."""

    @property
    @abc.abstractmethod
    def downsampling(self) -> int:
        """Pixels of a side for each side of a latent."""

    @property
    @abc.abstractmethod
    def frames_per_latent(self) -> int:
        """Frames for each latent but the first, which has one frame."""

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0

    def latent_frames(self, frames: int) -> int:
        """Returns the number of latents of a video.

        Raises:
          ConfigError: the latents have another number of frames; gives the nearest ones.
        """
        factor = self.frames_per_latent
        if frames < 1 or (frames - 1) % factor:
            nearest = [max(frames - 1, 0) // factor * factor + 1 + more for more in (0, factor)]
            raise ConfigError(
                f"The video has {frames} frames. The autoencoder takes one frame and then {factor} for each latent: "
                f"give {' or '.join(map(str, nearest))}."
            )
        return (frames - 1) // factor + 1

    def check_video(self, frames: int, height: int, width: int) -> None:
        """Raises a ConfigError if the latents of a video would have another size."""
        self.latent_frames(frames)
        if height % self.downsampling or width % self.downsampling:
            raise ConfigError(
                f"Frames of {height} x {width} pixels are not multiples of {self.downsampling}, by which the "
                "autoencoder shrinks them. Take other sides (image_size)."
            )


class AutoencoderBuild:
    """Base class of builders of a config's layers; the nth that draws values draws them from `fold_in(key, n)`."""

    def __init__(self, config: Any, key: jax.Array) -> None:
        self.config, self._key, self._draws = config, key, itertools.count()

    def next_key(self) -> jax.Array:
        return jax.random.fold_in(self._key, next(self._draws))


class VideoAutoencoder(nnx.Module):
    """An autoencoder of videos whose latents are normal: z = mean + exp(log_variance / 2) e.

    Attributes:
      config: a `VideoSizes` with the dtype of the activations.
    """

    config: Any

    @abc.abstractmethod
    def run_encoder(self, x: Videos, *, by_chunks: bool) -> Latents:
        """Returns the means and then the log-variances of the latents."""

    @abc.abstractmethod
    def run_decoder(self, latents: Latents, *, by_chunks: bool) -> Videos:
        """Returns videos; their values may lie outside of -1 to 1."""

    @abc.abstractmethod
    def statistics(self) -> tuple[Float[Array, " channels"], Float[Array, " channels"]]:
        """Returns mean and std of each channel; denoisers get (latents - mean) / std."""

    def encode(self, images: Videos, *, by_chunks: bool = False) -> tuple[Latents, Latents]:
        """Returns means and log-variances of the latents, in float32.

        Args:
          by_chunks: computes one latent after another if the layers are causal, which takes less memory; the result is
            the same.

        Raises:
          ConfigError: the latents have another size or number of frames.
        """
        self.config.check_video(*images.shape[1:4])
        moments = self.run_encoder(images.astype(self.config.dtype), by_chunks=by_chunks)
        mean, log_variance = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return mean, clipped_log_variance(log_variance)

    def decode(self, latents: Latents, *, by_chunks: bool = False) -> Videos:
        """Returns videos, -1 to 1, in float32; see `encode`."""
        return jnp.clip(self._decoded(latents, by_chunks=by_chunks), -1.0, 1.0)

    def _decoded(self, latents: Latents, *, by_chunks: bool) -> Videos:
        return self.run_decoder(latents.astype(self.config.dtype), by_chunks=by_chunks).astype(jnp.float32)

    def __call__(self, images: Videos, *, key: jax.Array) -> tuple[Videos, Latents, Latents]:
        """Returns the videos decoded from sampled latents, and the means and log-variances of the latents."""
        mean, log_variance = self.encode(images)
        latents = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        # Not clipped, since values outside would get no gradient.
        return self._decoded(latents, by_chunks=False), mean, log_variance

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Videos:
        """See `RunsOnBatches`."""
        # The mean: sampled latents would make the result random.
        return self.decode(self.encode(batch["images"])[0])

    def scaled_latents(self, images: Videos) -> Latents:
        """Computes the means of the latents, scaled for a denoiser."""
        return self.scaled_moments(images)[0]

    def scaled_moments(self, images: Videos) -> tuple[Latents, Latents]:
        """Computes the means and the standard deviations of the latents, scaled for a denoiser."""
        mean, log_variance = self.encode(images, by_chunks=True)
        means, stds = self.statistics()
        return (mean - means) / stds, jnp.exp(0.5 * log_variance) / stds

    def images_of(self, scaled: Latents) -> Videos:
        """Decodes scaled latents of a denoiser."""
        means, stds = self.statistics()
        return self.decode(scaled * stds + means, by_chunks=True)


def map_chunks(
    layers: Callable[[VideoFeatures, FrameCache], VideoFeatures], x: VideoFeatures, frames: int
) -> VideoFeatures:
    """Applies causal layers to the first frame of a video, then to `frames` after `frames`."""
    cache = FrameCache()
    first = layers(x[:, :1], cache)
    if x.shape[1] == 1:
        return first
    chunks = jnp.moveaxis(x[:, 1:].reshape(x.shape[0], -1, frames, *x.shape[2:]), 1, 0)

    def step(before: list[Array], chunk: VideoFeatures) -> tuple[list[Array], VideoFeatures]:
        cache = FrameCache(before)
        y = layers(chunk, cache)
        return cache.stored, y

    _, others = jax.lax.scan(step, cache.stored, chunks)
    # [chunks, batch, frames, height, width, channels]
    others = jnp.moveaxis(others, 0, 1)
    return jnp.concatenate([first, others.reshape(x.shape[0], -1, *others.shape[3:])], axis=1)
