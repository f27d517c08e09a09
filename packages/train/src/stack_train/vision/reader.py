"""Preprocessing of images: decoding, scaling, and the text that stands for an image in a prompt."""

import io
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from stack_core.abi.errors import DataError
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.grid import pillow
from stack_train.vision.siglip import SiglipConfig

__all__ = ["SeesImages", "SquareImages", "image_reader"]

_MODES = {1: "L", 3: "RGB"}


@runtime_checkable
class SeesImages(Protocol):
    """The config of a language model with images; see `Gemma3VisionConfig`."""

    vision: SiglipConfig
    image_tokens: int
    image_token: int | None
    image_begin: int | None
    image_end: int | None


@dataclass(frozen=True)
class SquareImages:
    """An `ImageReader` that scales images to squares, as Gemma 3 does, without regard to their proportions."""

    placeholder: str
    expansion: str
    token: int
    tokens: int
    shape: tuple[int, int, int]

    def read(self, data: bytes) -> UInt8[np.ndarray, "side side channels"]:
        """Decodes an image file and scales it bilinearly.

        Raises:
          DataError: the data is not an image, or Pillow is not installed.
        """
        image = pillow()
        try:
            with image.open(io.BytesIO(data)) as opened:
                converted = opened.convert(_MODES[self.shape[2]])
                scaled = converted.resize(self.shape[:2], image.Resampling.BILINEAR)
        # The exceptions of Pillow's decoders.
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            raise DataError(f"The {len(data)} bytes are no image that Pillow reads: {error}") from error
        return np.asarray(scaled, np.uint8).reshape(self.shape)


def image_reader(config: SeesImages, tokenizer: HuggingFaceTokenizer) -> SquareImages | None:
    """Returns the preprocessing of a model's images; None without image tokens in the config."""
    tokens = (config.image_begin, config.image_token, config.image_end)
    if config.image_token is None or None in tokens or config.vision.channels not in _MODES:
        return None
    begin, token, end = (tokenizer.token_bytes(each or 0).decode() for each in tokens)
    side = config.vision.image_size
    # Gemma's processor also writes the line breaks.
    expansion = f"\n\n{begin}{token * config.image_tokens}{end}\n\n"
    return SquareImages(begin, expansion, config.image_token, config.image_tokens, (side, side, config.vision.channels))
