"""Constructors of the auxiliary models that objectives train."""

from typing import Any

import jax

__all__ = ["scalar_head"]


def scalar_head(model: Any, *, key: jax.Array) -> Any:
    """Creates a `ScalarHead` for the hidden states of a model with this config."""
    from stack_rl.objectives.scalar import ScalarHead  # imports Flax, which configs do not need

    return ScalarHead(model, key=key)
