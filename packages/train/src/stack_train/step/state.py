"""The training state: everything that an update reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
from jax.tree_util import GetAttrKey

__all__ = ["AuxiliaryState", "TrainState"]

# Names of branches in checkpoints, where they differ from the fields. They are part of the checkpoint format.
_BRANCHES = {"mutable": "moved", "auxiliary": "further"}


class _Branches:
    """Registers a dataclass as a pytree with the checkpoint format's branch names as keys."""

    def __init_subclass__(cls) -> None:
        # By hand instead of `register_dataclass`, whose paths would have the names of the fields.
        jax.tree_util.register_pytree_with_keys_class(cls)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        return [(GetAttrKey(_BRANCHES.get(name, name)), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        return cls(*children)


@dataclass(frozen=True)
class AuxiliaryState(_Branches):
    """The variables of an auxiliary model, or their shapes or shardings in the same structure.

    Attributes:
      params: nested dict of the variables. A frozen copy of the initial model excludes variables shared with the
        trained model.
      opt_state: state of the optimizer; None for frozen models.
    """

    params: Any
    opt_state: Any = None


@dataclass(frozen=True)
class TrainState(_Branches):
    """Everything that an update reads and writes, or its shapes or shardings in the same structure.

    Attributes:
      step: number of updates done, an int32 scalar.
      params: nested dict of the variables that the optimizer updates.
      mutable: nested dict of the variables that the forward pass updates, such as batch-norm statistics.
      frozen: nested dict of the variables that training never changes.
      opt_state: state of the optimizer.
      key: PRNG key of the run; step n uses `fold_in(key, n)`.
      auxiliary: state of each auxiliary model of the objective, by name.
    """

    step: Any
    params: Any
    mutable: Any
    frozen: Any
    opt_state: Any
    key: Any
    auxiliary: Mapping[str, AuxiliaryState] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, Any]:
        """Variables with gradients: `params`, and the variables of trained auxiliary models by name."""
        return {**self.params, **{name: each.params for name, each in self._trained_auxiliary.items()}}

    def without_frozen(self) -> "TrainState":
        """Returns the part of the state that a checkpoint stores; for frozen variables it records the source."""
        return replace(self, frozen={}, auxiliary=self._trained_auxiliary)

    @property
    def _trained_auxiliary(self) -> dict[str, AuxiliaryState]:
        return {name: each for name, each in self.auxiliary.items() if each.opt_state is not None}
