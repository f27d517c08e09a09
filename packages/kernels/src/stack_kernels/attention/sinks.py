"""Gradient of attention's sinks, for kernels that leave it to their adapters."""

from typing import Any

import jax.numpy as jnp

__all__ = ["sinks_gradient"]


def sinks_gradient(sinks: Any, lse: Any, outputs: Any, cotangents: Any) -> Any:
    """Computes the gradient of the sinks, float32[heads]: the sum of -exp(s - lse) <o, do> over queries.

    Args:
      sinks: s, [heads].
      lse: [batch, q_seq, heads], including the sinks; -inf, with no gradient, for a query with neither key nor sink.
      outputs: o, [batch, q_seq, heads, features].
      cotangents: do, [batch, q_seq, heads, features].
    """
    shares = jnp.sum(outputs.astype(jnp.float32) * cotangents.astype(jnp.float32), axis=-1)
    # If the lse is -inf, so is the sink, and -inf - -inf would be NaN.
    weights = jnp.exp(sinks.astype(jnp.float32) - jnp.where(jnp.isneginf(lse), 0, lse))
    return -jnp.sum(weights * shares, axis=(0, 1))
