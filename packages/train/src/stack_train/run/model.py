"""The models of runs without their values: what a config builds, and what a run's sections make of it."""

from typing import Any

import jax
from flax import nnx

from stack_core.abi.plugins import registries
from stack_core.ops.building import is_quantized
from stack_train.run.config import RunConfig
from stack_train.run.transforms import transform_of
from stack_train.variables import ModelVariables, Tree

__all__ = ["abstract_model", "abstract_params", "holds_codes", "stored_model"]


def abstract_model(config: Any) -> Any:
    """A model without values, from its config; nothing is allocated."""
    family = registries.models[config.family]
    return nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))


def abstract_params(config: Any) -> Tree:
    """Shapes and dtypes of the variables of a config's model; nothing is allocated."""
    return ModelVariables.of(abstract_model(config)).abstract


def stored_model(config: RunConfig) -> Any:
    """The model that a run's checkpoints hold, transformed if the run's is, without values."""
    return transform_of(config).apply(abstract_model(config.model))


def holds_codes(config: RunConfig) -> bool:
    """Whether a run's checkpoints stand for quantized arrays and nothing that merges into them."""
    if transform_of(config).merges:
        return False
    variables = ModelVariables.of(stored_model(config)).abstract
    return any(map(is_quantized, jax.tree.leaves(variables, is_leaf=is_quantized)))
