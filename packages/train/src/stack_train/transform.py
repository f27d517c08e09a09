"""Composition of model transforms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from stack_core.abi.adapters import AdaptsModels
from stack_core.abi.transforms import MergesModel, ModelTransform

__all__ = ["UNCHANGED", "HoldsCodes", "Transforms"]


@runtime_checkable
class HoldsCodes(Protocol):
    """A `ModelTransform` whose models hold quantized arrays, and which exports to other libraries take."""

    def input_type(self, model: Any, path: str) -> str | None:
        """Returns the type of the inputs that a parameter multiplies, such as "int8"; None for floats."""
        ...


@dataclass(frozen=True)
class Transforms:
    """Composition of `ModelTransform`s. Each transform receives the output of the previous one."""

    members: tuple[ModelTransform, ...] = ()

    def apply(self, model: Any) -> Any:
        for transform in self.members:
            model = transform.apply(model)
        return model

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        for transform in self.members:  # the last transform made the model, so its `call` is the outermost
            function = partial(transform.call, function)
        return function(model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        return all(transform.trained(path, variable) for transform in self.members)

    @property
    def merges(self) -> bool:
        """True if `merged` changes the model."""
        return any(isinstance(transform, MergesModel) for transform in self.members)

    @property
    def adapting(self) -> AdaptsModels | None:
        """The last transform that adds adapters, or None."""
        return next((member for member in reversed(self.members) if isinstance(member, AdaptsModels)), None)

    def input_type(self, model: Any, path: str) -> str | None:
        """Returns the type of the inputs that a parameter multiplies; None for floats."""
        found = (member.input_type(model, path) for member in self.members if isinstance(member, HoldsCodes))
        return next((kind for kind in found if kind is not None), None)

    def merged(self, model: Any) -> Any:
        """Merges the additions of all mergeable transforms into the model; other transforms remain applied."""
        # The last transform made the outermost modules.
        for transform in reversed(self.members):
            if isinstance(transform, MergesModel):
                model = transform.merged(model)
        return model


UNCHANGED = Transforms()
"""The identity transform."""
