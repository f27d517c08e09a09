"""Preprocessing of images by Qwen3-VL: a bounded number of pixels."""

import math
from dataclasses import dataclass

from stack_core.abi.errors import DataError
from stack_core.text.images import ImageSize
from stack_train.vision.packed_images import PackedImages, padded_sizes

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
class GridImages(PackedImages):
    """An `ImageReader` that scales images bicubically to multiples of a token's side, as Qwen3-VL does.

    Attributes:
      placeholder, token, patch, merge, channels, resample: see `PackedImages`.
      min_pixels, max_pixels: bounds of the number of pixels of a scaled image.
    """

    min_pixels: int
    max_pixels: int

    layout = "axes"

    @property
    def sizes(self) -> tuple[int, ...]:
        return padded_sizes(-(-self.min_pixels // self.unit**2), self.max_pixels // self.unit**2)

    def expansion(self, size: ImageSize) -> str:
        return self.placeholder * size.tokens

    def measure(self, data: bytes) -> ImageSize:
        return ImageSize(self.count_tokens(data))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        height, width = scaled_size(height, width, unit=self.unit, **bounds)
        return height // self.unit, width // self.unit
