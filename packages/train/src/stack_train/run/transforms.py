"""Transforms of a run's model: the config sections named after registered transforms, applied in order."""

from collections.abc import Mapping
from typing import Any

from stack_core.abi.config import differences, to_mapping
from stack_core.abi.plugins import registries
from stack_train.data.abilities import ReshapesBatches
from stack_train.run.config import RunConfig
from stack_train.transform import Transforms

__all__ = ["recipe_differences", "transform_names", "transform_of"]


def transform_names(config: RunConfig) -> tuple[str, ...]:
    """Lists the config sections that transform the run's model, in the order in which they apply."""
    return tuple(name for name in config.sections if name in registries.transforms)


def transform_of(config: RunConfig) -> Transforms:
    """Builds the transforms of a run's model from its config sections."""
    data = config.batches
    shapes = data.call_spec(config.model) if isinstance(data, ReshapesBatches) else data.spec(config.model)
    return Transforms(
        tuple(registries.transforms[name](config.sections[name], shapes) for name in transform_names(config))
    )


def recipe_differences(config: RunConfig, other: RunConfig) -> list[str]:
    """Lists differences in the transforms that two runs share, such as "quant.rules.0.weights: 'int8', not 'int4'"."""
    common = [name for name in transform_names(config) if name in transform_names(other)]
    return differences(_recipes(config, common), _recipes(other, common))


def _recipes(config: RunConfig, names: list[str]) -> Mapping[str, Any]:
    return {name: to_mapping(config.sections[name]) for name in names}
