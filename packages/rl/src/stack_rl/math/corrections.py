"""Importance weights for tokens sampled by another policy: an older one, or a sampler with different rounding.

Each function takes log ratios log r = log p - log q of the policy p to the behaviour q, per token or per sequence
(`leveled`), and returns weights without a gradient.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stack_rl.math.sequences import sequence_mean, sequence_sum

__all__ = ["Level", "effective_share", "leveled", "mask", "off_policy_mask", "truncate"]

Level = Literal["token", "sequence_mean", "sequence_product"]
"""Ratio that weights a token: its own, or the geometric mean or the product of the ratios in its sequence."""


def truncate(log_ratio: Float[Array, "*tokens"], *, cap: float = 2.0) -> Float[Array, "*tokens"]:
    """Computes c = sg[min(r, cap)], which has little bias and a bounded variance.

    Source: Espeholt et al., IMPALA, 2018 (arXiv:1802.01561); for samplers that differ from trainers: Yao et al., Your
    efficient RL framework secretly brings you off-policy RL training, 2025, cap 2.
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


def mask(log_ratio: Float[Array, "*tokens"], *, low: float = 0.5, high: float = 5.0) -> Float[Array, "*tokens"]:
    """Computes c = sg[r] for low <= r <= high, else 0, which drops tokens whose ratio moved too far.

    Source: Ling team, Every step evolves (Ring-1T), 2025 (arXiv:2510.18855): IcePop, with 0.5 and 5.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0)


def leveled(
    log_ratio: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    level: Level,
) -> Float[Array, "batch seq"]:
    """Returns the log ratio that weights each token: its own, or the mean or sum over its sequence.

    The product of ratios (sum of log ratios) is the exact weight of a sequence, but its variance grows with the number
    of tokens. The geometric mean is biased, but comparable across lengths (GSPO, arXiv:2507.18071, equation 7).
    """
    if level == "token":
        return log_ratio
    combine = sequence_mean if level == "sequence_mean" else sequence_sum
    return combine(log_ratio, mask, segment_ids)


def off_policy_mask(
    log_ratio: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    *,
    threshold: float,
) -> Float[Array, "batch seq"]:
    """Computes m = 0 in sequences with A < 0 and mean(log q - log p) > threshold, else 1.

    A bad sequence that the policy has already made unlikely has nothing more to teach.

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 9.
    """
    left = sequence_mean(-jax.lax.stop_gradient(log_ratio), mask, segment_ids) > threshold
    return jnp.where(left & (advantages < 0), 0, 1).astype(log_ratio.dtype)


def effective_share(log_ratio: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """Computes (sum r)^2 / (n sum r^2), the effective sample size divided by n tokens; 1 on policy, 0 without tokens.

    Source: Kong, A note on importance sampling using standardized weights, 1992.
    """
    ratio = jnp.where(mask, jnp.exp(log_ratio), 0)
    squares = jnp.sum(mask.astype(ratio.dtype)) * jnp.sum(jnp.square(ratio))
    return jnp.square(jnp.sum(ratio)) / jnp.where(squares > 0, squares, 1)
