"""Preprocessing of images by Gemma 4: scaled to a number of tokens, in both directions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from stack_core.abi.errors import ConversionError, DataError
from stack_core.text.images import ImageLayout, ImageSize
from stack_train.vision.packed_images import PackedImages
from stack_train.vision.preprocessor import RESAMPLING, apply_preprocessor, read_resampling

__all__ = [
    "Gemma4Images",
    "MaxImageTokens",
    "check_gemma4_processor",
    "read_gemma4_preprocessor",
    "write_gemma4_preprocessor",
    "write_gemma4_processor",
]

MaxImageTokens = Literal[70, 140, 280, 560, 1120]
"""Numbers of tokens that transformers' processor supports."""


@dataclass(frozen=True)
class Gemma4Images(PackedImages):
    """An `ImageReader` that scales images up or down to the most tokens of an image.

    Attributes:
      placeholder, token, patch, merge, channels, resample: see `PackedImages`.
      before, after: texts around the tokens of an image.
      max_tokens: maximum number of tokens of an image. Proportions change by the rounding of sides, and if the
        image is longer and thinner than a row of `max_tokens`.
      positions: number of learned positions of rows and of columns, in patches.
      layout: see `ImageReader`.
    """

    before: str
    after: str
    max_tokens: int
    positions: int
    layout: ImageLayout

    @property
    def sizes(self) -> tuple[int, ...]:
        # All images are scaled to about this number.
        return (self.max_tokens,)

    def expansion(self, size: ImageSize) -> str:
        return f"{self.before}{self.placeholder * size.tokens}{self.after}"

    def measure(self, data: bytes) -> ImageSize:
        return ImageSize(self.count_tokens(data))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        scale = math.sqrt(self.max_tokens * self.unit**2 / (height * width))
        sides = (math.floor(scale * side / self.unit) for side in (height, width))
        rows, columns = (min(max(side, 1), self.max_tokens) for side in sides)
        if (longest := max(rows, columns) * self.merge) > self.positions:
            raise DataError(
                f"The image of {width} x {height} pixels has {longest} patches on a side; the model has "
                f"{self.positions} positions. Crop it."
            )
        return rows, columns


def read_gemma4_preprocessor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the config of a model with the preprocessing of its checkpoint's images.

    Args:
      config: a `Gemma4VisionConfig`.
      mapping: contents of `preprocessor_config.json`.

    Raises:
      ConversionError: see `read_preprocessor`.
    """
    # Colors act with `do_normalize` only, which is refused. transformers ignores the other two, too.
    unused = ("image_mean", "image_std", "image_seq_length", "size")
    mapping = {name: value for name, value in mapping.items() if name not in unused}
    return apply_preprocessor(config, mapping, fixed=_fixed_keys(config), read_fields=_read_fields)


def _read_fields(mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
    resample, problems = read_resampling(mapping, config.resample)
    tokens = mapping.pop("max_soft_tokens", config.max_image_tokens)
    if tokens not in get_args(MaxImageTokens):
        problems.append(f"max_soft_tokens={tokens!r}, not one of {', '.join(map(str, get_args(MaxImageTokens)))}")
    return {"max_image_tokens": tokens, "resample": resample}, problems


def _fixed_keys(config: Any) -> dict[str, Any]:
    tower = config.vision
    return {"do_normalize": False, "patch_size": tower.patch, "pooling_kernel_size": tower.merge}


def write_gemma4_preprocessor(config: Any) -> dict[str, Any]:
    """Returns the `preprocessor_config.json` of a model's config."""
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "processor_class": "Gemma4Processor",
        **_fixed_keys(config),
        "max_soft_tokens": config.max_image_tokens,
        "resample": RESAMPLING[config.resample],
    }


# Names of classes and contents of other files; audio and videos are not read.
_SILENT: Final = (
    *("auto_map", "chat_template", "image_processor", "image_seq_length", "processor_class"),
    *("audio_ms_per_token", "audio_seq_length", "feature_extractor", "video_processor"),
)


def check_gemma4_processor(name: str, mapping: Mapping[str, Any]) -> None:
    """Raises a ConversionError if a `processor_config.json` has unknown keys."""
    if unknown := [f"{key}={value!r}" for key, value in mapping.items() if value and key not in _SILENT]:
        raise ConversionError(
            f"processor_config.json asks for what the images of {name} do not do: {'; '.join(unknown)}."
        )


def write_gemma4_processor(config: Any) -> dict[str, Any]:
    """Returns the `processor_config.json` of a model's config."""
    return {
        "processor_class": "Gemma4Processor",
        "image_processor": write_gemma4_preprocessor(config),
        "image_seq_length": config.max_image_tokens,
    }
