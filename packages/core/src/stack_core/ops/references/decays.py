"""Decays between the tokens of a chunk."""

from typing import Any

import jax.numpy as jnp

__all__ = ["decays_between"]


def decays_between(decay: Any) -> Any:
    """Computes D_ti = exp(g_(i+1) + ... + g_t) for i <= t, and 0 for i > t.

    Each exponent is summed separately. The difference of two cumulative sums is undefined if a token forgets
    everything, and loses digits after every strong decay.

    Args:
      decay: g, [..., tokens], natural logarithms of the decays.

    Returns:
      D, [..., t, i].
    """
    size = decay.shape[-1]
    later = jnp.tril(jnp.ones((size, size), bool), -1)
    sums = jnp.cumsum(jnp.where(later, decay[..., None], 0), axis=-2)
    return jnp.where(later | jnp.eye(size, dtype=bool), jnp.exp(sums), 0)
