"""Losses on human preferences: pairs of a chosen and a rejected answer, or single answers labelled good or bad."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = [
    "accuracy",
    "dpo_loss",
    "dpo_margin",
    "ipo_loss",
    "kto_baseline",
    "kto_loss",
    "orpo_loss",
    "reward_loss",
    "simpo_loss",
]


def dpo_margin(
    logprobs: Float[Array, "batch 2"], reference_logprobs: Float[Array, "batch 2"], *, beta: float
) -> Float[Array, " batch"]:
    """Computes m = beta * ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))).

    m is the difference of the implicit rewards of the two answers.

    Args:
      logprobs: log-probabilities of the chosen and the rejected answer under the policy, summed over their tokens.
      reference_logprobs: the same under the frozen reference.
      beta: strength of the penalty for leaving the reference.

    Source: Rafailov et al., Direct Preference Optimization, 2023 (arXiv:2305.18290), equations 5 and 6.
    """
    rewards = beta * (logprobs - reference_logprobs)
    return rewards[:, 0] - rewards[:, 1]


def dpo_loss(margin: Float[Array, " batch"], *, label_smoothing: float = 0.0) -> Float[Array, " batch"]:
    """Computes L = -(1 - e) log sigmoid(m) - e log sigmoid(-m).

    Args:
      margin: m, as computed by `dpo_margin`.
      label_smoothing: e, the assumed fraction of pairs with a wrong label; 0 is the paper's loss.

    Source: Rafailov et al., 2023 (arXiv:2305.18290), equation 7; smoothing as in Mitchell, A note on DPO with noisy
    preferences, 2023.
    """
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def ipo_loss(margin: Float[Array, " batch"], *, beta: float = 0.1) -> Float[Array, " batch"]:
    """Computes L = (m - 1 / (2 beta))^2, which keeps the margin finite instead of driving it to infinity.

    Args:
      margin: m, as computed by `dpo_margin` with beta = 1: the difference of log ratios.
      beta: the paper's tau.

    Source: Azar et al., A general theoretical paradigm, 2023 (arXiv:2310.12036), equation 17. Log-probabilities are
    sums over tokens, as in the paper; TRL uses means, as if every answer had one token.
    """
    return jnp.square(margin - 1 / (2 * beta))


def orpo_loss(mean_logprobs: Float[Array, "batch 2"], *, weight: float = 0.1) -> Float[Array, " batch"]:
    """Computes L = -log p(chosen) - weight log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p).

    Args:
      mean_logprobs: log p of the chosen and the rejected answer, the means over their tokens; below 0.
      weight: the paper's lambda.

    Source: Hong et al., ORPO, 2024 (arXiv:2403.07691), equations 6 and 7. The first term covers the answer, as in the
    paper; in TRL it covers prompt and answer.
    """
    below_one = jnp.minimum(mean_logprobs, -1e-7)  # the odds of an answer with probability 1 are infinite
    log_odds = below_one - jnp.log(-jnp.expm1(below_one))
    return -mean_logprobs[:, 0] - weight * jax.nn.log_sigmoid(log_odds[:, 0] - log_odds[:, 1])


def simpo_loss(
    mean_logprobs: Float[Array, "batch 2"], *, beta: float = 2.0, gamma: float = 1.0
) -> Float[Array, " batch"]:
    """Computes L = -log sigmoid(beta (log p(chosen) - log p(rejected)) - gamma), log p a mean over tokens.

    Args:
      mean_logprobs: log p of the chosen and the rejected answer; there is no reference.
      beta: scale of the difference.
      gamma: target margin, not divided by beta.

    Source: Meng et al., SimPO, 2024 (arXiv:2405.14734), equation 6, with beta of 2 to 2.5 and gamma of 0.5 to 1.5.
    """
    return -jax.nn.log_sigmoid(beta * (mean_logprobs[:, 0] - mean_logprobs[:, 1]) - gamma)


def kto_baseline(mismatched_log_ratios: Float[Array, " batch"], weights: Float[Array, " batch"]) -> Float[Array, ""]:
    """Computes z = sg[max(0, mean of log p(y') - log p_ref(y'))] over mismatched answers y', an estimate of the KL.

    Args:
      mismatched_log_ratios: log ratios, summed over the tokens of each answer after the prompt of another one.
      weights: weight of each in the mean; 0 for padding.

    Source: Ethayarajh et al., KTO, 2024 (arXiv:2402.01306), section 4.1.
    """
    mean = jnp.sum(mismatched_log_ratios * weights) / jnp.maximum(jnp.sum(weights), 1)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0))


def kto_loss(
    log_ratios: Float[Array, " batch"],
    desirable: Bool[Array, " batch"],
    baseline: Float[Array, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, " batch"]:
    """Computes L = d (1 - sigmoid(beta (h - z))) for desirable answers, u (1 - sigmoid(beta (z - h))) for others.

    Args:
      log_ratios: h = log p(y) - log p_ref(y), summed over the tokens.
      desirable: True for good answers.
      baseline: z, as computed by `kto_baseline`.
      beta: strength of the penalty for leaving the reference.
      desirable_weight, undesirable_weight: d and u; the paper keeps d n_d / (u n_u) between 1 and 4/3.

    Source: Ethayarajh et al., KTO, 2024 (arXiv:2402.01306), section 4.1.
    """
    gain = beta * (log_ratios - baseline)
    return jnp.where(desirable, desirable_weight * jax.nn.sigmoid(-gain), undesirable_weight * jax.nn.sigmoid(gain))


def reward_loss(
    rewards: Float[Array, "batch 2"], *, margin: float = 0.0, centre: float = 0.0
) -> Float[Array, " batch"]:
    """Computes L = -log sigmoid(r(chosen) - r(rejected) - margin) + centre (r(chosen) + r(rejected))^2.

    Args:
      rewards: r of the chosen and the rejected answer.
      margin: target difference of the two rewards.
      centre: weight of the penalty that keeps rewards around 0; reward differences alone do not determine the mean.

    Source: Bradley and Terry, 1952, as Ouyang et al., InstructGPT, 2022 (arXiv:2203.02155), equation 1; margin: Touvron
    et al., Llama 2, 2023 (arXiv:2307.09288), equation 2; centre: Eisenstein et al., 2023 (arXiv:2312.09244), 0.01.
    """
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + centre * jnp.square(chosen + rejected)


def accuracy(margin: Float[Array, " batch"]) -> Float[Array, " batch"]:
    """Returns 1 for pairs with a positive margin, else 0."""
    return (margin > 0).astype(jnp.float32)
