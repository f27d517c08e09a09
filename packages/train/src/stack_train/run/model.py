"""Abstract models of runs: the family's model, and the model after the run's transforms."""

from typing import Any

import jax
from flax import nnx

from stack_core.abi.plugins import registries
from stack_core.ops.building import is_quantized
from stack_train.run.config import RunConfig
from stack_train.run.transforms import transform_of
from stack_train.variables.model_variables import ModelVariables, Tree

__all__ = ["abstract_model", "abstract_params", "holds_codes", "stored_model"]


def abstract_model(config: Any) -> Any:
    """Builds the model of a config without values; nothing is allocated."""
    family = registries.models[config.name]
    return nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))


def abstract_params(config: Any) -> Tree:
    """Returns the shapes and dtypes of the variables of a config's model; nothing is allocated."""
    return ModelVariables.of(abstract_model(config)).abstract


def stored_model(config: RunConfig) -> Any:
    """Builds the model in a run's checkpoints without values, with the run's transforms applied."""
    return transform_of(config).apply(abstract_model(config.model))


def holds_codes(config: RunConfig) -> bool:
    """Checks whether a run's checkpoints hold quantized arrays, without a transform to merge, such as LoRA."""
    if transform_of(config).merges:
        return False
    variables = ModelVariables.of(stored_model(config)).abstract
    return any(map(is_quantized, jax.tree.leaves(variables, is_leaf=is_quantized)))
