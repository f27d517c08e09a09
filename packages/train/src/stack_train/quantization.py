"""Runs of quantized models: a section of the config with a quantizer's name is the recipe of the run's model."""

from collections.abc import Mapping
from typing import Any

from stack_core.config import differences, to_mapping
from stack_core.errors import ConfigError
from stack_core.plugins import registries
from stack_train.config import RunConfig
from stack_train.step import UNCHANGED, ModelTransform, batch_shapes

__all__ = ["quantizer_name", "recipe_differences", "transform_of"]


def quantizer_name(config: RunConfig) -> str | None:
    """The quantizer of a run's model, or None for a run in float.

    Raises:
      ConfigError: there are several.
    """
    names = [name for name in config.sections if name in registries.quantizers]
    if len(names) > 1:
        raise ConfigError(f"Sections {' and '.join(names)} each quantize the model. Keep one of them.")
    return names[0] if names else None


def transform_of(config: RunConfig) -> ModelTransform:
    """What the recipe of a run, if it has one, makes of its model."""
    name = quantizer_name(config)
    if name is None:
        return UNCHANGED
    quantizer, recipe = registries.quantizers[name], config.sections[name]
    seq_tokens = min(config.data.seq_tokens, config.model.max_positions)
    shapes = batch_shapes(config.data.batch_size, seq_tokens)
    return ModelTransform(lambda model: quantizer.apply(model, recipe, shapes)[0], quantizer.call)


def recipe_differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Lists in what the recipes of two runs differ, "quant.rules.0.weights: 'int8', not 'int4'"."""
    return differences(_recipe(ours), _recipe(theirs))


def _recipe(config: RunConfig) -> Mapping[str, Any]:
    name = quantizer_name(config)
    return {} if name is None else {name: to_mapping(config.sections[name])}
