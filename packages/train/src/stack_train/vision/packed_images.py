"""Images that keep their proportions, as patches whose number depends on the size of the image."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from stack_core.text.images import ReadImage
from stack_train.diffusion.grid import pillow
from stack_train.vision.reader import apply_to_image, decode

__all__ = ["PackedImages", "Resampling", "padded_sizes"]

Resampling = Literal["bilinear", "bicubic"]


def padded_sizes(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Returns `ImageReader.sizes`: `min_tokens`, the powers of two above it, and `max_tokens`."""
    # Padding up to the next power of two costs at most half of the tower's work.
    min_tokens = min(min_tokens, max_tokens)
    powers = (2**power for power in range(min_tokens.bit_length(), max_tokens.bit_length()))
    return tuple(sorted({min_tokens, *(power for power in powers if min_tokens < power < max_tokens), max_tokens}))


@dataclass(frozen=True)
class PackedImages:
    """Base class of an `ImageReader` that scales images to multiples of a token's side and divides them into patches.

    Attributes:
      placeholder: text of the image token, which the chat template writes once for an image.
      token: id of the image token.
      patch: side of a patch in pixels.
      merge: side of a token in patches.
      channels: number of color channels.
      resample: filter of Pillow that scales images.
    """

    placeholder: str
    token: int
    patch: int
    merge: int
    channels: int
    resample: Resampling = field(default="bicubic", kw_only=True)

    has_grids = True

    @property
    def unit(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge

    @abstractmethod
    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image.

        Args:
          height, width: size of the image in pixels.

        Raises:
          DataError: the proportions are not supported.
        """

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens * self.merge**2, self.channels * self.patch**2)

    def count_tokens(self, data: bytes) -> int:
        # An image turned by its EXIF orientation has as many tokens.
        width, height = apply_to_image(data, lambda image: image.size)
        return math.prod(self.grid(height, width))

    def read(self, data: bytes) -> ReadImage:
        """Decodes and scales an image file.

        Raises:
          DataError: the data is not an image, its proportions are not supported, or Pillow is not installed.
        """

        def scaled(image: Any) -> tuple[UInt8[np.ndarray, "height width channels"], tuple[int, int]]:
            image = decode(image, self.channels)
            rows, columns = grid = self.grid(image.height, image.width)
            size = columns * self.unit, rows * self.unit
            found = image.resize(size, pillow().Resampling[self.resample.upper()])
            return np.asarray(found, np.uint8).reshape(*size[::-1], self.channels), grid

        pixels, grid = apply_to_image(data, scaled)
        return ReadImage(self._patches(pixels), math.prod(grid), grid)

    def _patches(self, pixels: UInt8[np.ndarray, "height width channels"]) -> UInt8[np.ndarray, "patches values"]:
        """Divides an image into patches, [channels, patch, patch] each; the patches of a token are adjacent."""
        rows, columns = (side // self.unit for side in pixels.shape[:2])
        cut = pixels.reshape(rows, self.merge, self.patch, columns, self.merge, self.patch, self.channels)
        return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(self.shape(rows * columns))
