"""Estimates of KL(p || p_ref) at tokens that p drew, from their log-probabilities alone."""

from collections.abc import Callable, Mapping
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.errors import ConfigError

__all__ = ["LOSS_ESTIMATORS", "corrected", "estimator_in_loss", "k1", "k2", "k3"]


def k1(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """k1 = log p - log p_ref. Without bias, so that it belongs into a reward; a loss it cannot be.

    Source, of all three: Schulman, Approximating KL divergence, 2020.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """k2 = (log p - log p_ref)^2 / 2. Its expected gradient is that of the KL divergence, on policy."""
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def k3(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """k3 = p_ref / p - 1 - log(p_ref / p). It is never negative.

    Its expected gradient on policy is that of KL(p_ref || p), another direction than that of KL(p || p_ref).
    """
    difference = reference_logprobs - logprobs
    return jnp.expm1(difference) - difference


def corrected(estimate: Float[Array, "*tokens"], log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """r k: the estimate at tokens that an older policy drew; the gradient of r k3 is that of the KL divergence.

    Args:
      log_ratio: log r = log p - log p_old, differentiated as well.

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 7.
    """
    return jnp.exp(log_ratio) * estimate


Estimator = Callable[[jax.Array, jax.Array], jax.Array]

LOSS_ESTIMATORS: Final[Mapping[str, Estimator]] = {"k2": k2, "k3": k3}
"""Those that may be a part of a loss."""


def estimator_in_loss(name: str) -> Estimator:
    """The estimator of that name, to be a part of a loss.

    Raises:
      ConfigError: it is k1, or none.
    """
    if name == "k1":
        raise ConfigError(
            "The KL estimator 'k1', log p - log p_ref, cannot be a part of the loss: its gradient is that of log p, "
            "whose expectation is zero, so that it adds noise and holds nothing. Choose 'k2' or 'k3', or subtract k1 "
            "from the reward."
        )
    if name not in LOSS_ESTIMATORS:
        raise ConfigError(f"There is no KL estimator {name!r} for a loss. There are: {', '.join(LOSS_ESTIMATORS)}.")
    return LOSS_ESTIMATORS[name]
