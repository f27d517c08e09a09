"""Loss of the critic."""

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
    """Computes L = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    Args:
      values: V, predicted by the critic.
      old_values: V_old, predicted by the critic when the advantages were computed.
      returns: R = A + V_old, with the A of `gae`.
      clip: c; None uses the squared error without clipping.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), as in OpenAI's baselines; the paper
    clips only the policy.
    """
    squared = jnp.square(values - returns)
    if clip is None:
        return 0.5 * squared
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    return 0.5 * jnp.maximum(squared, jnp.square(near - returns))
