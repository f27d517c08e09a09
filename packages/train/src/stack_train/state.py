"""The training state: everything that an update reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

__all__ = ["TrainState"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "moved", "frozen", "companions", "opt_state", "key", "further"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes, or its shapes or shardings in the same structure.

    Attributes:
      step: number of updates done, an int32 scalar.
      params: nested dict of the variables that the optimizer updates.
      moved: nested dict of the variables that the forward pass updates, such as batch-norm statistics.
      frozen: nested dict of the variables that training never changes.
      companions: nested dicts of the variables of companions, by name. A companion that copies the initial model
        holds only the variables that it does not share with the trained model.
      opt_state: state of the optimizer.
      key: PRNG key of the run; step n uses `fold_in(key, n)`.
      further: `FurtherState` of each auxiliary model that the objective trains, by name.
    """

    step: Any
    params: Any
    moved: Any
    frozen: Any
    companions: Any
    opt_state: Any
    key: Any
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, Any]:
        """Variables that gradients are computed for: `params`, and the parameters of auxiliary models by name."""
        return {**self.params, **{name: each.params for name, each in self.further.items()}}

    @property
    def beside(self) -> dict[str, Any]:
        """Variables of the companions and auxiliary models that the objective is called with, by name."""
        return {**self.companions, **{name: each.params for name, each in self.further.items()}}

    def without_frozen(self) -> "TrainState":
        """Returns the part of the state that a checkpoint stores; for frozen variables it records the source."""
        return replace(self, frozen={}, companions={})
