"""Companions: frozen models that an objective uses in addition to the trained model, such as a reference."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
from flax import nnx

from stack_core.abi.models import ModelFamily
from stack_core.abi.training import ModelTransform
from stack_train.transform import UNCHANGED
from stack_train.variables import ModelVariables

__all__ = ["INIT", "Companion"]

INIT: Final = "init"
"""Source of a companion that is a copy of the trained model at the start of training."""


@dataclass(frozen=True)
class Companion:
    """A frozen model that an objective uses.

    Attributes:
      source: `INIT` or "run:DIRECTORY". With `INIT`, the trainer's model is used and the other fields are unset.
      family: model family.
      model_config: config of the model.
      transform: transform of the model, as in the run that trained it.
    """

    source: str
    family: ModelFamily | None = None
    model_config: Any = None
    transform: ModelTransform = UNCHANGED

    @cached_property
    def model(self) -> ModelVariables:
        """Variables of the model, without values."""
        family = self.family
        assert family is not None, "a companion that is the trained model has no variables of its own"
        built = nnx.eval_shape(lambda: family.build(self.model_config, key=jax.random.key(0)))
        return ModelVariables.of(self.transform.apply(built))
