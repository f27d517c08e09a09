"""Calls of models on batches of training data."""

from collections.abc import Callable
from typing import Any

from stack_core.abi.models import RunsOnBatches

__all__ = ["call_on_batches"]


def call_on_batches(model: Any) -> Callable[..., Any] | None:
    """Returns the `call` of `quantize_model` whose keyword arguments are a batch, for a model that `RunsOnBatches`.

    Other models get None.
    """
    return _on_batch if isinstance(model, RunsOnBatches) else None


def _on_batch(model: Any, **batch: Any) -> Any:
    return model.on_batch(batch)
