"""Transforms of a run's model, such as quantization and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["MergesModel", "ModelTransform", "TransformFactory"]


@runtime_checkable
class ModelTransform(Protocol):
    """A transform that replaces a model by another, quantized or with adapters; several apply in order."""

    def apply(self, model: Any) -> Any:
        """Returns the transformed model; `model` stays unchanged.

        Args:
          model: a model with values, or an abstract one from `jax.eval_shape`, which gives an abstract result.
        """
        ...

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes `function(model, *args, **kwargs)` for a model that `apply` returned, as one program.

        The transform also covers computations that the function composes from several methods of the model, as a loss
        does.
        """
        ...

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Returns whether a run trains a variable of the transformed model.

        Args:
          path: keys from the model to the variable.
          variable: an `nnx.Variable` that a run without the transform would train.
        """
        ...


@runtime_checkable
class MergesModel(Protocol):
    """A transform that can fold its changes back into the original model structure, as adapters are merged."""

    def merged(self, model: Any) -> Any:
        """Returns a model without the parts that `apply` added to `model`; the same function up to rounding."""
        ...


TransformFactory = Callable[[Any, Mapping[str, Any]], ModelTransform]
"""Entry of the registry `transforms`: builds a transform from a section's config and a sample batch (or its shapes)."""
