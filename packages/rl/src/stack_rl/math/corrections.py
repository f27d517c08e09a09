"""Weights that correct for tokens that another policy drew: an older one, or the sampler's, which rounds otherwise.

Each takes log ratios log r = log p - log q of the policy p to the behaviour q that drew, a token's own or one that all
tokens of a sequence share (`leveled`), and gives weights that are constants to the gradient.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stack_rl.math.sequences import sequence_mean, sequence_sum

__all__ = ["Level", "effective_share", "leveled", "mask", "off_policy_mask", "truncate"]

Level = Literal["token", "sequence_mean", "sequence_product"]
"""Whose ratio a token is weighed by: its own; the geometric mean of its sequence's; their product."""


def truncate(log_ratio: Float[Array, "*tokens"], *, cap: float = 2.0) -> Float[Array, "*tokens"]:
    """c = sg[min(r, cap)]: little bias, and bounded variance.

    Source: Espeholt et al., IMPALA, 2018 (arXiv:1802.01561); for samplers that differ from trainers: Yao et al., Your
    efficient RL framework secretly brings you off-policy RL training, 2025, cap 2.
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


def mask(log_ratio: Float[Array, "*tokens"], *, low: float = 0.5, high: float = 5.0) -> Float[Array, "*tokens"]:
    """c = sg[r] where low <= r <= high, else 0: what has moved too far is left out.

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
    """The log ratio that each token is weighed by: its own, or the mean or sum of its sequence's.

    The product of ratios is the exact weight of a sequence, with a variance that grows with its tokens; the geometric
    mean is biased, and comparable between lengths (GSPO, arXiv:2507.18071, equation 7).
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
    most: float,
) -> Float[Array, "batch seq"]:
    """m = 0 in sequences with A < 0 and mean(log q - log p) > most, else 1.

    Sequences that the policy has left behind teach it nothing more by being bad.

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 9.
    """
    left = sequence_mean(-jax.lax.stop_gradient(log_ratio), mask, segment_ids) > most
    return jnp.where(left & (advantages < 0), 0, 1).astype(log_ratio.dtype)


def effective_share(log_ratio: Float[Array, "*tokens"], mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
    """(sum r)^2 / (n sum r^2), the effective sample size over the number of tokens; 1 on policy, 0 without a token.

    Source: Kong, A note on importance sampling using standardized weights, 1992.
    """
    ratio = jnp.where(mask, jnp.exp(log_ratio), 0)
    squares = jnp.sum(mask.astype(ratio.dtype)) * jnp.sum(jnp.square(ratio))
    return jnp.square(jnp.sum(ratio)) / jnp.where(squares > 0, squares, 1)
