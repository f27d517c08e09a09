"""Factors of the updated weights that a step computes from its forward pass."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from stack_core.abi.errors import TrainingError

__all__ = ["scale_weights"]


def scale_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Multiplies updated parameters by factors.

        update <- factor (param + update) - param

    A factor of 1 keeps the update, bit for bit. The argument `weight_factors` of `update` has arrays by the path of a
    parameter; each broadcasts to its parameter.
    """
    extended = optax.with_extra_args_support(inner)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight_factors: Mapping[tuple[Any, ...], jax.Array] | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        if weight_factors is None:
            raise TrainingError(
                "optimizer.qk_clip reads the logits of the forward pass, which an optimizer alone does not see: train "
                "by make_step, or leave optimizer.qk_clip out."
            )
        found: Any = extended.update(updates, state, params, **extra)
        flat, values = flatten_mapping(found[0]), flatten_mapping(params)
        for path, factor in weight_factors.items():
            scaled = factor * (values[path] + flat[path]) - values[path]
            flat[path] = jnp.where(factor == 1, flat[path], scaled).astype(flat[path].dtype)
        return unflatten_mapping(flat), found[1]

    return optax.GradientTransformationExtraArgs(inner.init, update)
