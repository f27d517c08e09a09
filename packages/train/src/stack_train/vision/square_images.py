"""Images that are scaled to squares of one size."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from stack_core.text.images import ImageSize, ReadImage
from stack_train.diffusion.grid import pillow
from stack_train.vision.reader import apply_to_image, decode

__all__ = ["SquareImages"]


@dataclass(frozen=True)
class SquareImages:
    """An `ImageReader` that scales images to squares, as Gemma 3 does, without regard to their proportions.

    Attributes:
      placeholder: text that the chat template writes for an image.
      before, token_text, after: texts of the expansion.
      token: id of the image token.
      tokens: number of tokens per image.
      side: side of the squares in pixels.
      channels: number of color channels.
    """

    placeholder: str
    before: str
    token_text: str
    after: str
    token: int
    tokens: int
    side: int
    channels: int

    has_grids, layout = False, "whole"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.tokens,)

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (self.side, self.side, self.channels)

    def expansion(self, size: ImageSize) -> str:
        return f"{self.before}{self.token_text * size.tokens}{self.after}"

    def count_tokens(self, data: bytes) -> int:
        return self.tokens

    def measure(self, data: bytes) -> ImageSize:
        return ImageSize(self.tokens)

    def read(self, data: bytes) -> ReadImage:
        """Decodes an image file and scales it bilinearly.

        Raises:
          DataError: the data is not an image, or Pillow is not installed.
        """

        def scaled(image: Any) -> UInt8[np.ndarray, "side side channels"]:
            found = decode(image, self.channels).resize((self.side, self.side), pillow().Resampling.BILINEAR)
            return np.asarray(found, np.uint8).reshape(self.shape(self.tokens))

        return ReadImage(apply_to_image(data, scaled), self.tokens)
