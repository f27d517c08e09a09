"""`data.name: videos`: captioned videos, encoded into latents and text conditions, or pixels for an autoencoder."""

from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Batches, Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.captions import captions_of
from stack_train.data.image_batches import ImageBatches, ImageSettings, LabelledImages
from stack_train.data.image_files import IMAGE_CHANNELS, FileImages, ImageSize, OnUnreadable
from stack_train.data.kinds.captioned import TextConditioned, encoded_batches, encoded_spec
from stack_train.data.video_files import find_videos, read_videos
from stack_train.diffusion.denoiser import ImagesConfig, VideosConfig
from stack_train.diffusion.pipeline import Encoders

__all__ = ["VideosData"]


@config
class VideosData(ImageSettings):
    """Video files and folders of PNG files; needs stack-train[video], and for GIF, WebP and PNG stack-train[images].

    Reads the first `model.frames` frames of each video and scales their centre squares to the model's size. The caption
    of `cat.mp4` or the folder `cat` is in the text file `cat.txt`, or in the folder's `metadata.jsonl`. With
    `pipeline`, batches have the arrays of kind captioned. Without it, they contain "images", the pixels of videos, and
    "weights", for an autoencoder.

    Attributes:
      source: glob of files and folders, such as `videos/*`.
      pipeline: diffusers directory with vae and text_encoder; its denoiser is not read. None trains an autoencoder.
      name: selects this kind of data.
      unreadable: policy for videos that cannot be read or have too few frames: "error", or "skip" with a warning.
      encoded_at_once: batch size of the encoders, in videos or captions.
      frame_rate: frames per second of the training videos, chosen by their times; None takes the frames of the files.
    """

    source: str
    pipeline: str | None = None
    name: Literal["videos"] = "videos"
    unreadable: OnUnreadable = "error"
    encoded_at_once: PositiveInt = 1
    frame_rate: PositiveFloat | None = None

    @property
    def encoders(self) -> str | None:
        return self.pipeline

    def work(self) -> tuple[str, int]:
        return "videos", self.batch_size

    def spec(self, model: Any) -> Shapes:
        if self.pipeline is not None:
            return encoded_spec(self, model)
        shape = (self.batch_size, model.frames, model.image_size, model.image_size, model.channels)
        return {
            "images": jax.ShapeDtypeStruct(shape, np.float32),
            "weights": jax.ShapeDtypeStruct((self.batch_size,), np.float32),
        }

    def check(self, model: Any) -> None:
        family = model.name
        if not isinstance(model, VideosConfig) or not isinstance(model, ImagesConfig):
            raise ConfigError(
                f"Data of kind videos is for models of videos, not for family {family!r}; use wan, ltx "
                "or an autoencoder of videos."
            )
        if isinstance(model, TextConditioned) == (self.pipeline is None):
            wrong = "needs data.pipeline, the directory of its encoders" if self.pipeline is None else "reads pixels"
            remedy = "Name it" if self.pipeline is None else "Leave data.pipeline out"
            raise ConfigError(f"Family {family!r} {wrong}. {remedy}.")
        if self.pipeline is None and model.channels not in IMAGE_CHANNELS:
            numbers = " or ".join(map(str, IMAGE_CHANNELS))
            raise ConfigError(f"model.channels is {model.channels}; videos are read with {numbers}.")

    def build(self, *, seed: int, model: Any) -> Batches:
        """Reads and encodes the videos, or maps earlier results from the cache.

        Raises:
          DataError: Pillow is not installed, a video cannot be read or has too few frames, a caption is missing, or the
            latents do not have about unit variance.
          ConversionError: `pipeline` lacks an encoder, or an encoder does not fit the model.
        """
        if self.pipeline is not None:

            def read(encoders: Encoders, model: Any) -> dict[ImageSize, FileImages]:
                autoencoder = encoders.autoencoder.config
                side = model.image_size * autoencoder.downsampling
                frames = (model.frames - 1) * autoencoder.frames_per_latent + 1
                return {(side, side): self._read(size=side, frames=frames, channels=autoencoder.channels)}

            return encoded_batches(self, read, partial(captions_of, noun="videos"), seed=seed, model=model)
        videos = self._read(size=model.image_size, frames=model.frames, channels=model.channels)
        return ImageBatches(self, LabelledImages(videos.pixels, None, videos.names), seed=seed)

    def _read(self, *, size: int, frames: int, channels: int) -> FileImages:
        settings: dict[str, Any] = {"unreadable": self.unreadable, "source": self.source, "frame_rate": self.frame_rate}
        return read_videos(find_videos(self.source), size=size, frames=frames, channels=channels, **settings)
