"""Conversion of `preprocessor_config.json`, which describes the preprocessing of images of any size."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from stack_core.abi.errors import ConfigError, ConversionError

__all__ = ["read_preprocessor", "write_preprocessor"]

_BICUBIC: Final = 3  # Pillow's number
# Keys with one supported value, which is also the default of transformers.
_FIXED: Final[Mapping[str, Any]] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": _BICUBIC,
}
# Names of classes, the layout of the arrays, and where they are computed.
_HARMLESS_KEYS: Final = """
    _processor_class data_format default_to_square device disable_grouping feature_extractor_type image_processor_type
    input_data_format model_input_names processor_class return_metadata return_tensors
"""
_HARMLESS: Final = frozenset(_HARMLESS_KEYS.split())


def read_preprocessor(config: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the config of a model with the preprocessing in a `preprocessor_config.json`.

    Keys of null are absent. Every other key sets a field, equals the only supported value, or is refused.

    Args:
      config: a `Qwen3VLSettings`.
      mapping: contents of the file.

    Raises:
      ConversionError: a setting is not supported, or a key is unknown; the message lists every problem.
    """
    given = {name: value for name, value in mapping.items() if value is not None and name not in _HARMLESS}
    tower = config.vision
    fixed = {
        **_FIXED,
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.frames,
    }
    problems = [
        f"{name}={given[name]!r}, not {value!r}" for name, value in fixed.items() if given.get(name, value) != value
    ]
    size = given.pop("size", {})
    bounds = {
        "min_pixels": given.pop("min_pixels", size.get("shortest_edge", config.min_pixels)),
        "max_pixels": given.pop("max_pixels", size.get("longest_edge", config.max_pixels)),
    }
    problems += [f"size with {name!r}" for name in size if name not in ("shortest_edge", "longest_edge")]
    mean, std = (tuple(given.pop(name, own)) for name, own in (("image_mean", tower.mean), ("image_std", tower.std)))
    problems += [f"{name}={value!r}" for name, value in given.items() if name not in fixed and value]
    if problems:
        raise ConversionError(
            f"preprocessor_config.json asks for what the images of {config.name} do not do: {'; '.join(problems)}."
        )
    try:
        return replace(config, vision=replace(tower, mean=mean, std=std), **bounds)
    except ConfigError as error:
        raise ConversionError(f"preprocessor_config.json does not fit the model: {error}") from error


def write_preprocessor(config: Any) -> dict[str, Any]:
    """Returns the `preprocessor_config.json` of a model's config."""
    tower = config.vision
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.frames,
        "image_mean": list(tower.mean),
        "image_std": list(tower.std),
    }
