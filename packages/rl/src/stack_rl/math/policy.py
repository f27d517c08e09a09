"""Policy-gradient losses per token; `weights` has the weights of their sum.

In all of them, A is the advantage of a token, and log r = log p(token) - log p_old(token) is the log ratio of the
policy to the policy at the start of the update, as computed by `log_ratio`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = ["MOST_LOG_RATIO", "cispo_loss", "clipped_loss", "is_clipped", "is_outside", "log_ratio", "reinforce_loss"]

MOST_LOG_RATIO = 20.0
"""Bound of the absolute log ratio: exp(20) is 5e8, beyond which gradients overflow."""


def log_ratio(
    logprobs: Float[Array, "*tokens"], old_logprobs: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Computes log r = log p - log p_old, clipped to +-20; 0 outside `mask`.

    The mask is applied first; otherwise a NaN in padding would reach the gradient as 0 * NaN.
    """
    return jnp.clip(jnp.where(mask, logprobs - old_logprobs, 0), -MOST_LOG_RATIO, MOST_LOG_RATIO)


def reinforce_loss(logprobs: Float[Array, "*tokens"], advantages: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes L = -A log p.

    On policy, its gradient is the gradient of the expected return. For tokens of another policy, weight it by a
    correction.

    Source: Williams, Simple statistical gradient-following algorithms, 1992; without clipping as in RLOO, Ahmadian et
    al., Back to basics, 2024 (arXiv:2402.14740).
    """
    return -advantages * logprobs


def clipped_loss(
    log_ratio: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Float[Array, "*tokens"]:
    """Computes L = -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -dual A.

    With the mean log ratio of a sequence (`sequence_mean`) for each of its tokens, it is the loss of GSPO.

    Args:
      log_ratio: log r.
      advantages: A.
      low, high: distance that a ratio may move below and above 1, in the direction of A, before its token stops
        learning. DAPO uses high 0.28; GSPO uses 3e-4 and 4e-4.
      dual: c > 1, which bounds the loss of a bad token that became likely; None does not bound it.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), equation 7; dual clip: Ye et al.,
    Mastering complex control in MOBA games, 2019 (arXiv:1912.09729), c = 3; two bounds: Yu et al., DAPO, 2025
    (arXiv:2503.14476), equation 10; sequences: Zheng et al., GSPO, 2025 (arXiv:2507.18071), equation 5.
    """
    ratio = jnp.exp(log_ratio)
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return loss if dual is None else jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)


def is_clipped(
    log_ratio: Float[Array, "*tokens"], advantages: Float[Array, "*tokens"], *, low: float, high: float
) -> Bool[Array, "*tokens"]:
    """Returns whether a ratio has moved so far in the direction of its advantage that its token has no gradient."""
    ratio = jnp.exp(log_ratio)
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def is_outside(log_ratio: Float[Array, "*tokens"], *, lowest: float, highest: float) -> Bool[Array, "*tokens"]:
    """Returns whether a ratio lies outside the bounds of `cispo_loss`, which then limit its weight."""
    ratio = jnp.exp(log_ratio)
    return (ratio < lowest) | (ratio > highest)


def cispo_loss(
    logprobs: Float[Array, "*tokens"],
    log_ratio: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    *,
    lowest: float = 0.0,
    highest: float = 5.0,
) -> Float[Array, "*tokens"]:
    """Computes L = -sg[clip(r, lowest, highest)] A log p, which gives every token a gradient with a bounded weight.

    Source: MiniMax-M1, 2025 (arXiv:2506.13585), section 3.1. Departures: (1) the paper writes the bounds as 1 - e_low
    and 1 + e_high, effectively has no lower one and names no upper one; 5 is the value in TRL.
    """
    return -jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), lowest, highest)) * advantages * logprobs
