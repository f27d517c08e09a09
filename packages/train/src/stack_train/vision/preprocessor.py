"""Conversion of `preprocessor_config.json`, which describes the preprocessing of images."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.vision.packed_images import Resampling

__all__ = [
    "RESAMPLING",
    "apply_preprocessor",
    "is_size",
    "read_color",
    "read_preprocessor",
    "read_resampling",
    "read_square_preprocessor",
    "write_preprocessor",
    "write_square_preprocessor",
]

RESAMPLING: Final[Mapping[Resampling, int]] = {"bilinear": 2, "bicubic": 3}
"""Pillow's numbers of filters."""

# Keys with one supported value, which is also the default of transformers.
_FIXED: Final[Mapping[str, Any]] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
}
# Names of classes, the layout of the arrays, and where they are computed.
_HARMLESS_KEYS: Final = """
    _processor_class data_format default_to_square device disable_grouping feature_extractor_type image_processor_type
    input_data_format model_input_names processor_class return_metadata return_tensors
"""
_HARMLESS: Final = frozenset(_HARMLESS_KEYS.split())


def read_preprocessor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the config of a model with the preprocessing in a `preprocessor_config.json`.

    Keys of null are absent, as are unknown flags `do_...` of false. Every other key sets a field, equals the only
    supported value, or is refused.

    Args:
      config: a `QwenVLSettings`.
      mapping: contents of the file.

    Raises:
      ConversionError: a setting is not supported, or a key is unknown; the message lists every problem.
    """
    tower = config.vision
    fixed = {
        "resample": RESAMPLING["bicubic"],
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.frames,
    }
    return apply_preprocessor(config, mapping, fixed=fixed, read_fields=_pixel_bounds)


def apply_preprocessor(
    config: Any,
    mapping: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any],
    read_fields: Callable[[dict[str, Any], Any], tuple[dict[str, Any], list[str]]],
) -> Any:
    """Returns a config with the preprocessing in a `preprocessor_config.json`.

    Args:
      config: a config of a model with images.
      mapping: contents of the file.
      fixed: keys with one supported value, besides the keys of all models.
      read_fields: function of the contents and the config that removes the keys of the model's fields from the
        contents, and returns the fields and the problems of these keys.

    Raises:
      ConversionError: see `read_preprocessor`.
    """
    given = {name: value for name, value in mapping.items() if value is not None and name not in _HARMLESS}
    fixed = {**_FIXED, **fixed}
    changes, problems = read_fields(given, config)
    problems += [
        f"{name}={given[name]!r}, not {value!r}" for name, value in fixed.items() if given.get(name, value) != value
    ]
    # Flags of steps that other models have.
    problems += [
        f"{name}={value!r}"
        for name, value in given.items()
        if name not in fixed and not (value is False and name.startswith("do_"))
    ]
    if problems:
        raise ConversionError(
            f"preprocessor_config.json asks for what the images of {config.name} do not do: {'; '.join(problems)}."
        )
    try:
        return replace(config, **changes)
    except ConfigError as error:
        raise ConversionError(f"preprocessor_config.json does not fit the model: {error}") from error


def read_color(mapping: dict[str, Any], tower: Any) -> tuple[Any, list[str]]:
    """Removes the constants of the channels; returns a tower's config with them, and the problems of their keys."""
    mean, std = mapping.pop("image_mean", tower.mean), mapping.pop("image_std", tower.std)
    problems = []
    if not _is_color(mean, tower.channels):
        problems.append(f"image_mean={mean!r}, not a list of {tower.channels} numbers")
    if not _is_color(std, tower.channels) or min(std) <= 0:
        problems.append(f"image_std={std!r}, not a list of {tower.channels} positive numbers")
    return tower if problems else replace(tower, mean=tuple(mean), std=tuple(std)), problems


def read_resampling(mapping: dict[str, Any], default: Resampling) -> tuple[Resampling, list[str]]:
    """Removes the key of the filter that scales images; returns the filter, and the problem of the key if any."""
    number = mapping.pop("resample", RESAMPLING[default])
    names = [name for name, known in RESAMPLING.items() if type(number) is int and known == number]
    return (names[0], []) if names else (default, [f"resample={number!r}, not 2 (bilinear) or 3 (bicubic)"])


def _pixel_bounds(mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
    """Removes the keys of sizes and colors; returns their fields, and the problems of these keys."""
    vision, problems = read_color(mapping, config.vision)
    size = mapping.pop("size", None)
    if size is not None and not isinstance(size, Mapping):
        problems.append(f"size={size!r}, not a mapping with 'shortest_edge' and 'longest_edge'")
    edges = {name: value for name, value in size.items() if value is not None} if isinstance(size, Mapping) else {}
    bounds = {
        "min_pixels": mapping.pop("min_pixels", edges.get("shortest_edge", config.min_pixels)),
        "max_pixels": mapping.pop("max_pixels", edges.get("longest_edge", config.max_pixels)),
    }
    problems += [f"{name}={value!r}, not a positive integer" for name, value in bounds.items() if not is_size(value)]
    problems += [f"size with {name!r}" for name in edges if name not in ("shortest_edge", "longest_edge")]
    return {"vision": vision, **bounds}, problems


def is_size(value: Any) -> bool:
    """Returns whether a value of a file is a positive integer."""
    return type(value) is int and value > 0


def _is_color(values: Any, channels: int) -> bool:
    is_list = isinstance(values, (list, tuple)) and len(values) == channels
    return is_list and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def write_preprocessor(config: Any, processor_class: str) -> dict[str, Any]:
    """Returns the `preprocessor_config.json` of a model's config, with the class of transformers' processor."""
    tower = config.vision
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.frames,
        "image_mean": list(tower.mean),
        "image_std": list(tower.std),
    }


def read_square_preprocessor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Checks the preprocessing of a model with square images, and returns its config unchanged.

    Args:
      config: a `Gemma3VisionConfig`.
      mapping: contents of the file.

    Raises:
      ConversionError: see `read_preprocessor`.
    """
    # Crops of large images, which act with `do_pan_and_scan` only, a flag that is refused.
    mapping = {name: value for name, value in mapping.items() if not name.startswith("pan_and_scan_")}
    return apply_preprocessor(config, mapping, fixed=_square_keys(config), read_fields=lambda *_: ({}, []))


def write_square_preprocessor(config: Any) -> dict[str, Any]:
    """Returns the `preprocessor_config.json` of a model with square images."""
    kinds = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
    return {**kinds, **_square_keys(config)}


def _square_keys(config: Any) -> dict[str, Any]:
    side, half = config.vision.image_size, [0.5] * config.vision.channels
    return {
        "size": {"height": side, "width": side},
        "resample": RESAMPLING["bilinear"],
        "image_mean": half,
        "image_std": half,
        "image_seq_length": config.image_tokens,
    }
