"""Estimators of KL(p || p_ref) from the log-probabilities of tokens sampled from p."""

from collections.abc import Callable, Mapping
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.errors import ConfigError

__all__ = ["LOSS_ESTIMATORS", "corrected", "estimator_in_loss", "k1", "k2", "k3"]


def k1(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes k1 = log p - log p_ref, which is unbiased. It suits a reward, but not a loss.

    Source, of all three: Schulman, Approximating KL divergence, 2020.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes k2 = (log p - log p_ref)^2 / 2, whose on-policy gradient equals the KL divergence's in expectation."""
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def k3(logprobs: Float[Array, "*tokens"], reference_logprobs: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes k3 = p_ref / p - 1 - log(p_ref / p), which is never negative.

    Its expected gradient on policy is the gradient of KL(p_ref || p), which differs in direction from that of KL(p ||
    p_ref).
    """
    difference = reference_logprobs - logprobs
    return jnp.expm1(difference) - difference


def corrected(estimate: Float[Array, "*tokens"], log_ratio: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes r k, the estimate for tokens sampled by an older policy; r k3 has the gradient of the KL divergence.

    Args:
      estimate: k, one of the estimators.
      log_ratio: log r = log p - log p_old, which is differentiated as well.

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), equation 7.
    """
    return jnp.exp(log_ratio) * estimate


Estimator = Callable[[jax.Array, jax.Array], jax.Array]

LOSS_ESTIMATORS: Final[Mapping[str, Estimator]] = {"k2": k2, "k3": k3}
"""Estimators that may be part of a loss."""


def estimator_in_loss(name: str) -> Estimator:
    """Returns the estimator with this name, for use in a loss.

    Raises:
      ConfigError: the name is k1 or unknown.
    """
    if name == "k1":
        raise ConfigError(
            "kl_estimator 'k1', log p - log p_ref, cannot be a part of the loss: its gradient is that of log p, "
            "whose expectation is zero, so it only adds noise. Choose 'k2' or 'k3', or subtract k1 from the reward "
            "by kl_in: reward."
        )
    if name not in LOSS_ESTIMATORS:
        raise ConfigError(f"There is no KL estimator {name!r} for a loss. There are: {', '.join(LOSS_ESTIMATORS)}.")
    return LOSS_ESTIMATORS[name]
