"""The state of training: all that an update reads and writes."""

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
    """All that an update reads and writes; or its shapes, or its shardings, in the same structure.

    Attributes:
      step: int32 scalar, updates done.
      params: nested dict of the variables that the optimizer updates.
      moved: nested dict of those that the forward pass assigns, such as the statistics of a batch norm.
      frozen: nested dict of those that stay as they are.
      companions: nested dicts of the variables of frozen models beside the trained one, by name; where one is the
        trained model as it was at the start, of those alone that it does not share.
      opt_state: the optimizer's state.
      key: the run's PRNG key; step n draws from `fold_in(key, n)`.
      further: a `FurtherState` of each model of the objective's own, by name.
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
        """All that gradients are taken by: `params`, and the parameters of further models under their names."""
        return {**self.params, **{name: each.params for name, each in self.further.items()}}

    @property
    def beside(self) -> dict[str, Any]:
        """The variables of the models that the objective is called with beside the trained one, by name."""
        return {**self.companions, **{name: each.params for name, each in self.further.items()}}

    def without_frozen(self) -> "TrainState":
        """What a checkpoint holds; of the rest it holds the source."""
        return replace(self, frozen={}, companions={})
