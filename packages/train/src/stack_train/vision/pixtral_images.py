"""Preprocessing of images by Pixtral: a bounded side, and a token of text after each row of tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stack_core.abi.errors import ConversionError, DataError
from stack_core.text.images import ImageSize
from stack_train.vision.packed_images import PackedImages, padded_sizes
from stack_train.vision.preprocessor import RESAMPLING, apply_preprocessor, is_size, read_color, read_resampling
from stack_train.vision.reader import apply_to_image, upright_size

__all__ = [
    "PixtralImages",
    "read_pixtral_preprocessor",
    "read_pixtral_processor",
    "write_pixtral_preprocessor",
    "write_pixtral_processor",
]

_LEAST_TOKENS = 64  # smaller images are padded to one compiled shape


@dataclass(frozen=True)
class PixtralImages(PackedImages):
    """An `ImageReader` that scales larger images down to a square, and all to multiples of a token's side.

    Attributes:
      placeholder, token, patch, merge, channels, resample: see `PackedImages`.
      image_break: text of the token after each row but the last.
      image_end: text of the token after the last row.
      longest_edge: side of the square in pixels; sides are rounded up to multiples afterwards.
    """

    image_break: str
    image_end: str
    longest_edge: int

    layout = "rows"

    @property
    def sizes(self) -> tuple[int, ...]:
        return padded_sizes(_LEAST_TOKENS, math.ceil(self.longest_edge / self.unit) ** 2)

    def expansion(self, size: ImageSize) -> str:
        assert size.grid is not None
        rows, columns = size.grid
        return self.image_break.join([self.placeholder * columns] * rows) + self.image_end

    def measure(self, data: bytes) -> ImageSize:
        width, height = apply_to_image(data, upright_size)
        grid = self.grid(height, width)
        return ImageSize(math.prod(grid), grid)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height, width) / self.longest_edge
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in (height, width)]
        if min(sides) == 0:
            raise DataError(
                f"The image of {width} x {height} pixels has {sides[1]} x {sides[0]} after scaling it to "
                f"longest_edge={self.longest_edge}. Crop it, or raise model.longest_edge."
            )
        rows, columns = (math.ceil(side / self.unit) for side in sides)
        return rows, columns


def read_pixtral_preprocessor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the config of a model with the preprocessing in a `preprocessor_config.json`.

    Args:
      config: a `PixtralSettings`.
      mapping: contents of the file.

    Raises:
      ConversionError: see `read_preprocessor`.
    """
    # Padding of a batch; patches are packed here.
    mapping = {name: value for name, value in mapping.items() if name != "do_pad"}
    patch = config.vision.patch
    if mapping.get("patch_size") == {"height": patch, "width": patch}:
        mapping["patch_size"] = patch
    return apply_preprocessor(config, mapping, fixed={"patch_size": patch}, read_fields=_read_size_keys)


def _read_size_keys(mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
    """Removes the keys of size, filter and colors; returns their fields, and the problems of these keys."""
    vision, problems = read_color(mapping, config.vision)
    size = mapping.pop("size", config.longest_edge)
    edges = {name: value for name, value in size.items() if value is not None} if isinstance(size, Mapping) else size
    match edges:
        case {"longest_edge": edge, **others} if not others:
            pass
        case {"height": edge, "width": width, **others} if not others and edge == width:
            pass
        case _:
            edge = edges
    if not is_size(edge):
        problems.append(f"size={size!r}, not a positive integer, 'longest_edge', or equal 'height' and 'width'")
    resample, more = read_resampling(mapping, config.resample)
    return {"vision": vision, "longest_edge": edge, "resample": resample}, problems + more


def write_pixtral_preprocessor(config: Any) -> dict[str, Any]:
    """Returns the `preprocessor_config.json` of a model's config."""
    tower = config.vision
    return {
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": config.longest_edge},
        "patch_size": {"height": tower.patch, "width": tower.patch},
        "resample": RESAMPLING[config.resample],
        "image_mean": list(tower.mean),
        "image_std": list(tower.std),
    }


# Names of classes and contents of other files; config.json has the id of the image token.
_SILENT: Final = ("auto_map", "chat_template", "image_processor", "image_token", "processor_class")


def read_pixtral_processor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the config of a model with the tokens around images in a `processor_config.json`.

    Args:
      config: a `PixtralSettings`.
      mapping: contents of the file.

    Raises:
      ConversionError: a size is not the model's, or a key is unknown; the message lists every problem.
    """
    given = {name: value for name, value in mapping.items() if value is not None and name not in _SILENT}
    names, fixed = _processor_keys(config)
    problems = [
        f"{name}={given[name]!r}, not {value!r}" for name, value in fixed.items() if given.get(name, value) != value
    ]
    texts = {name: given[key] for key, name in names.items() if key in given}
    problems += [
        f"{name}={text!r}, not a text" for name, text in texts.items() if not isinstance(text, str) or not text
    ]
    problems += [f"{name}={value!r}" for name, value in given.items() if name not in {*names, *fixed}]
    if problems:
        raise ConversionError(
            f"processor_config.json asks for what the images of {config.name} do not do: {'; '.join(problems)}."
        )
    return replace(config, **texts)


def write_pixtral_processor(config: Any) -> dict[str, Any]:
    """Returns the `processor_config.json` of a model's config."""
    names, fixed = _processor_keys(config)
    return {
        "processor_class": "PixtralProcessor",
        **fixed,
        **{key: getattr(config, name) for key, name in names.items()},
    }


def _processor_keys(config: Any) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the fields of the config by key, and the keys with one supported value."""
    sizes = {"patch_size": config.vision.patch, "spatial_merge_size": config.merged_patches or 1}
    return {"image_break_token": "image_break", "image_end_token": "image_end"}, sizes
