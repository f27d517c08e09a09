"""Frozen models that an objective asks beside the trained one: a reference, a teacher."""

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
"""The source of a companion that is the trained model as it was at the start."""


@dataclass(frozen=True)
class Companion:
    """A frozen model of its own.

    Attributes:
      source: `INIT`, in which case the rest is the trainer's, or "run:DIRECTORY".
    """

    source: str
    family: ModelFamily | None = None
    model_config: Any = None
    transform: ModelTransform = UNCHANGED

    @cached_property
    def model(self) -> ModelVariables:
        """What the model is made of, without its values."""
        family = self.family
        assert family is not None, "a companion that is the trained model has no variables of its own"
        built = nnx.eval_shape(lambda: family.build(self.model_config, key=jax.random.key(0)))
        return ModelVariables.of(self.transform.apply(built))
