"""Transforms of a model in a row, or none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stack_core.abi.adapters import AdaptsModels
from stack_core.abi.training import MergesModel, ModelTransform

__all__ = ["UNCHANGED", "Transforms"]


@dataclass(frozen=True)
class Transforms:
    """Several `ModelTransform`s as one: each applies to the model that the one before made."""

    members: tuple[ModelTransform, ...] = ()

    def apply(self, model: Any) -> Any:
        for transform in self.members:
            model = transform.apply(model)
        return model

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        for transform in self.members:  # the last one made the model, so its call is the outermost
            function = partial(transform.call, function)
        return function(model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        return all(transform.trained(path, variable) for transform in self.members)

    @property
    def merges(self) -> bool:
        """Whether `merged` changes a model."""
        return any(isinstance(transform, MergesModel) for transform in self.members)

    @property
    def adapting(self) -> AdaptsModels | None:
        """The last member that adds adapters."""
        return next((member for member in reversed(self.members) if isinstance(member, AdaptsModels)), None)

    def merged(self, model: Any) -> Any:
        """The model without what transforms added that merge; what the others did to it stays."""
        for transform in reversed(self.members):
            if isinstance(transform, MergesModel):
                model = transform.merged(model)
        return model


UNCHANGED = Transforms()
"""Leaves a family's model as it is."""
