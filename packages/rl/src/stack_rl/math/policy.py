"""Losses of the policy gradient, one number a token; what they are summed with is in `weights`.

In all of them A is the advantage of a token, and log r = log p(token) - log p_old(token) the log ratio of the policy to
the one that the update starts from, as `log_ratio` gives it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = ["MOST_LOG_RATIO", "cispo_loss", "clipped_loss", "is_clipped", "log_ratio", "reinforce_loss"]

MOST_LOG_RATIO = 20.0
"""Log ratios are cut off here, on both sides: exp(20) is 5e8, beyond which gradients overflow."""


def log_ratio(
    logprobs: Float[Array, "*tokens"], old_logprobs: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """log r = log p - log p_old, within +-20; 0 outside of `mask`, whatever stands there.

    The mask goes first, as a NaN of padding would otherwise reach the gradient through 0 * NaN.
    """
    return jnp.clip(jnp.where(mask, logprobs - old_logprobs, 0), -MOST_LOG_RATIO, MOST_LOG_RATIO)


def reinforce_loss(logprobs: Float[Array, "*tokens"], advantages: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """L = -A log p.

    The gradient of the expected return while the policy draws its own tokens, which a correction weighs otherwise.

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
    """L = -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -dual A.

    With the mean log ratio of a sequence (`sequence_mean`) for each of its tokens it is the loss of GSPO.

    Args:
      low, high: how far a ratio may move before its token stops to learn; DAPO's high is 0.28, GSPO's are 3e-4, 4e-4.
      dual: c > 1, which bounds the loss of a token that was bad and became likely; None does not.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), equation 7; dual clip: Ye et al.,
    Mastering complex control in MOBA games, 2019 (arXiv:1912.09729), c = 3; two bounds: Yu et al., DAPO,
    2025 (arXiv:2503.14476), equation 10; sequences: Zheng et al., GSPO, 2025 (arXiv:2507.18071), equation 5.
    """
    ratio = jnp.exp(log_ratio)
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return loss if dual is None else jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)


def is_clipped(
    log_ratio: Float[Array, "*tokens"], advantages: Float[Array, "*tokens"], *, low: float, high: float
) -> Bool[Array, "*tokens"]:
    """Whether a token has moved so far the way that its advantage asks for that `clipped_loss` has no gradient."""
    ratio = jnp.exp(log_ratio)
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def cispo_loss(
    logprobs: Float[Array, "*tokens"],
    log_ratio: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    *,
    lowest: float = 0.0,
    highest: float = 5.0,
) -> Float[Array, "*tokens"]:
    """L = -sg[clip(r, lowest, highest)] A log p: every token learns, at a bounded weight.

    Source: MiniMax-M1, 2025 (arXiv:2506.13585), section 3.1. Departures: (1) the paper writes the bounds as 1 - e_low
    and 1 + e_high, has no lower one in effect and names no upper one; 5 is that of TRL.
    """
    return -jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), lowest, highest)) * advantages * logprobs
