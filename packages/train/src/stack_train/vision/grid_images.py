"""Images that keep their proportions, as patches whose number depends on the size of the image."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from stack_core.abi.errors import DataError
from stack_core.text.images import ReadImage
from stack_train.diffusion.grid import pillow
from stack_train.vision.reader import apply_to_image, decode

__all__ = ["GridImages", "scaled_size"]

_MOST_PROPORTION = 200


def scaled_size(height: int, width: int, *, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the size to which an image is scaled: multiples of `unit`, with a number of pixels between two bounds.

    Proportions are kept up to the rounding, as by transformers' `smart_resize`.

    Raises:
      DataError: one side is more than 200 times the other, or no size near these proportions fits the bounds.
    """
    if max(height, width) > _MOST_PROPORTION * min(height, width):
        raise DataError(
            f"The image has {width} x {height} pixels; the model takes sides up to {_MOST_PROPORTION} times as long as "
            "the other. Crop it."
        )
    found = [round(side / unit) * unit for side in (height, width)]
    if math.prod(found) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        found = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif math.prod(found) < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        found = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    if math.prod(found) > max_pixels:
        raise DataError(
            f"The image of {width} x {height} pixels has {found[1]} x {found[0]} after scaling to multiples of {unit}, "
            f"which is more than max_pixels={max_pixels}. Crop it, or raise model.max_pixels."
        )
    return found[0], found[1]


@dataclass(frozen=True)
class GridImages:
    """An `ImageReader` that scales images bicubically to multiples of a token's side, as Qwen3-VL does.

    Attributes:
      placeholder: text of the image token, which the chat template writes once for an image.
      token: id of the image token.
      patch: side of a patch in pixels.
      merge: side of a token in patches.
      channels: number of color channels.
      min_pixels, max_pixels: bounds of the number of pixels of a scaled image.
    """

    placeholder: str
    token: int
    patch: int
    merge: int
    channels: int
    min_pixels: int
    max_pixels: int

    has_grids = True

    @property
    def sizes(self) -> tuple[int, ...]:
        # Padding up to the next power of two costs at most half of the tower's work.
        most = self.max_pixels // self._unit**2
        least = min(-(-self.min_pixels // self._unit**2), most)
        doubled = [2**power for power in range(least.bit_length(), most.bit_length()) if least < 2**power < most]
        return tuple(sorted({least, *doubled, most}))

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens * self.merge**2, self.channels * self.patch**2)

    def expansion(self, tokens: int) -> str:
        return self.placeholder * tokens

    def count_tokens(self, data: bytes) -> int:
        # An image turned by its EXIF orientation has as many tokens.
        rows, columns = self._grid(apply_to_image(data, lambda image: image.size))
        return rows * columns

    def read(self, data: bytes) -> ReadImage:
        """Decodes an image file and scales it bicubically.

        Raises:
          DataError: the data is not an image, `scaled_size` refuses its proportions, or Pillow is not installed.
        """

        def scaled(image: Any) -> tuple[UInt8[np.ndarray, "height width channels"], tuple[int, int]]:
            image = decode(image, self.channels)
            rows, columns = grid = self._grid(image.size)
            size = columns * self._unit, rows * self._unit
            found = image.resize(size, pillow().Resampling.BICUBIC)
            return np.asarray(found, np.uint8).reshape(*size[::-1], self.channels), grid

        pixels, grid = apply_to_image(data, scaled)
        return ReadImage(self._patches(pixels), math.prod(grid), grid)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image of (width, height) pixels."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        height, width = scaled_size(size[1], size[0], unit=self._unit, **bounds)
        return height // self._unit, width // self._unit

    def _patches(self, pixels: UInt8[np.ndarray, "height width channels"]) -> UInt8[np.ndarray, "patches values"]:
        """Divides an image into patches, [channels, patch, patch] each; the patches of a token are adjacent."""
        rows, columns = (side // self._unit for side in pixels.shape[:2])
        cut = pixels.reshape(rows, self.merge, self.patch, columns, self.merge, self.patch, self.channels)
        return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(self.shape(rows * columns))

    @property
    def _unit(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge
