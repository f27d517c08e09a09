"""Makes the further models that objectives train."""

from typing import Any

import jax

__all__ = ["scalar_head"]


def scalar_head(model: Any, *, key: jax.Array) -> Any:
    """A `ScalarHead` for the hidden states of a model with this config."""
    from stack_rl.objectives.scalar import ScalarHead  # loads Flax, which whoever trains has

    return ScalarHead(model, key=key)
