"""The loss of a critic."""

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["value_loss"]


def value_loss(
    values: Float[Array, "*tokens"],
    old_values: Float[Array, "*tokens"],
    returns: Float[Array, "*tokens"],
    *,
    clip: float | None = 0.2,
) -> Float[Array, "*tokens"]:
    """L = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    Args:
      old_values: V_old, of the critic when the advantages were computed.
      returns: R = A + V_old, with the A of `gae`.
      clip: c; None is the squared error alone.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), as OpenAI's baselines have it; the
    paper clips only the policy.
    """
    squared = jnp.square(values - returns)
    if clip is None:
        return 0.5 * squared
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum(squared, jnp.square(near - returns))
