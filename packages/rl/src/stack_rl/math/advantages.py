"""Advantages of episodes or tokens over their expected return, computed on the host.

Functions of episodes take the reward and the group of each episode; a group is the set of attempts at one prompt, and
groups may differ in size.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int, Real

__all__ = [
    "ADVANTAGES",
    "centred",
    "distilled",
    "equal_groups",
    "gae",
    "group_normalized",
    "kl_to_go",
    "leave_one_out",
    "overlong",
    "whitened",
    "whitened_tokens",
]

# Arguments may have any real dtype, including integers and half precision; arithmetic and results are float64.
Rewards = Real[np.ndarray, " episodes"]
PerEpisode = Float[np.ndarray, " episodes"]
Groups = Int[np.ndarray, " episodes"]
Tokens = Real[np.ndarray, "batch seq"]
PerToken = Float[np.ndarray, "batch seq"]
Mask = Bool[np.ndarray, "batch seq"]


def centred(rewards: Rewards, groups: Groups) -> PerEpisode:
    """Computes A_i = r_i - mean of the group's rewards.

    Source: Liu et al., Understanding R1-Zero-like training (Dr. GRPO), 2025 (arXiv:2503.20783): dividing by the
    standard deviation would give the largest weight to groups that are nearly all right or all wrong.
    """
    place, counts = _places(groups)
    rewards = rewards.astype(np.float64)
    return rewards - (np.bincount(place, weights=rewards) / counts)[place]


def group_normalized(rewards: Rewards, groups: Groups, *, epsilon: float = 1e-6) -> PerEpisode:
    """Computes A_i = (r_i - mean) / (s + e), with s^2 = sum (r - mean)^2 / (G - 1) over the G rewards of a group.

    A_i is 0 in a group of one and in a group with equal rewards.

    Source: Shao et al., DeepSeekMath (GRPO), 2024 (arXiv:2402.03300), section 4.1.2. Departures: (1) the paper has no
    e; it is 1e-6 in verl and Tunix, 1e-4 in TRL. (2) G - 1, as in PyTorch's `std`; the paper does not specify it.
    """
    place, counts = _places(groups)
    distance = centred(rewards, groups)
    deviation = np.sqrt(np.bincount(place, weights=distance**2) / np.maximum(counts - 1, 1))
    return distance / (deviation + epsilon)[place]


def leave_one_out(rewards: Rewards, groups: Groups) -> PerEpisode:
    """Computes A_i = r_i - mean of the group's other rewards = G / (G - 1) (r_i - mean); 0 in a group of one.

    Source: Ahmadian et al., Back to basics (RLOO), 2024 (arXiv:2402.14740).
    """
    place, counts = _places(groups)
    return centred(rewards, groups) * (counts / np.maximum(counts - 1, 1))[place]


def whitened(rewards: Rewards, groups: Groups, *, epsilon: float = 1e-8) -> PerEpisode:
    """Computes A_i = (r_i - mean of its group) / (s + e), with s the standard deviation of these over all episodes.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262), its variant with the group's baseline. Departures: (1) s is
    computed over episodes, not over tokens as in verl, so the length of an answer does not change its share.
    """
    distance = centred(rewards, groups)
    return distance / (np.sqrt(np.mean(distance**2)) + epsilon) if len(distance) else distance


ADVANTAGES: Final[Mapping[str, Callable[[Rewards, Groups], PerEpisode]]] = {
    "group": group_normalized,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "whitened": whitened,
}
"""Advantage estimators of episodes, by their names in `objective.advantage`."""


def equal_groups(rewards: Rewards, groups: Groups) -> Bool[np.ndarray, " episodes"]:
    """Returns whether all rewards of each episode's group are equal, which gives the group no gradient."""
    place, counts = _places(groups)
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, place, rewards)
    np.maximum.at(highest, place, rewards)
    return (lowest == highest)[place]


def overlong(
    lengths_tokens: Real[np.ndarray, " episodes"], *, max_tokens: Any, buffer_tokens: Any
) -> Float[np.ndarray, " episodes"]:
    """Computes DAPO's length penalty: 0 up to L - B tokens, then falling linearly to -1 at L, and -1 beyond.

        (L - B - length) / B between the two, with L = max_tokens and B = buffer_tokens

    Args:
      lengths_tokens: length of each answer.
      max_tokens, buffer_tokens: L and B, numbers or arrays with a number per answer.

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), equation 13, with L = 20480 and B = 4096 tokens.
    """
    return np.clip((max_tokens - buffer_tokens - lengths_tokens) / buffer_tokens, -1.0, 0.0)


def gae(rewards: Tokens, values: Tokens, mask: Mask, *, discount: float = 1.0, decay: float = 0.95) -> PerToken:
    """Computes A_t = d_t + discount decay A_t', with d_t = r_t + discount V_t' - V_t and t' the next sampled token.

    Prompts, observations and padding are not steps of the episode: they are skipped, as if the row contained only the
    tokens in `mask`. A row is one episode; the value at its end is 0.

    Args:
      rewards: reward of each token. The reward that comes with an observation belongs to the last token sampled before
        it.
      values: V_t, the expected return before token t.
      mask: tokens sampled by the policy; the advantages of other tokens are 0.
      discount, decay: gamma and lambda; 1 and 0.95 are usual for language models.

    Source: Schulman et al., Generalized advantage estimation, 2015 (arXiv:1506.02438), equation 16.
    """
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    advantages = np.zeros_like(values)
    # A and V of the next sampled token, [batch].
    following, next_value = np.zeros_like(values[:, 0]), np.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        drawn = mask[:, place]
        delta = rewards[:, place] + discount * next_value - values[:, place]
        following = np.where(drawn, delta + discount * decay * following, following)
        next_value = np.where(drawn, values[:, place], next_value)
        advantages[:, place] = np.where(drawn, following, 0)
    return advantages


def whitened_tokens(advantages: Tokens, mask: Mask, *, epsilon: float = 1e-8) -> PerToken:
    """Computes A'_t = (A_t - mean) / sqrt(variance + e), over the batch's tokens in `mask`; 0 for other tokens.

    Source: Andrychowicz et al., What matters in on-policy reinforcement learning, 2020 (arXiv:2006.05990), section 3.3.
    Departures: (1) the variance divides by the number of tokens, while verl divides by one fewer.
    """
    advantages, count = advantages.astype(np.float64), max(np.count_nonzero(mask), 1)
    distance = np.where(mask, advantages - np.where(mask, advantages, 0).sum() / count, 0)
    return distance / np.sqrt(np.square(distance).sum() / count + epsilon)


def kl_to_go(rewards: Rewards, k1: Tokens, mask: Mask, *, coefficient: float) -> PerToken:
    """Computes A_t = r - coefficient * sum of k1 over the sampled tokens from t on; to be whitened over the batch.

    Args:
      rewards: rewards of the episodes, [batch]; a row is one episode.
      k1: log p - log p_ref of each token, with p the policy that sampled it.
      mask: tokens sampled by the policy; the advantages of other tokens are 0.
      coefficient: weight of the KL term.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262).
    """
    ahead = np.cumsum(np.where(mask, k1, 0.0)[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
    return np.where(mask, rewards.astype(np.float64)[:, None] - coefficient * ahead, 0)


def distilled(logprobs: Tokens, teacher_logprobs: Tokens, mask: Mask, *, coefficient: float = 1.0) -> PerToken:
    """Computes A_t = -coefficient (log p(token) - log p_teacher(token)), on-policy distillation as a policy gradient.

    The expected gradient is that of the reverse KL divergence from the teacher at each token. A token gets no credit
    for later tokens (discount 0).

    Args:
      logprobs: log-probabilities under the policy that sampled the tokens.
      teacher_logprobs: log-probabilities under the teacher.
      mask: tokens sampled by the policy; the advantages of other tokens are 0.
      coefficient: scale of the advantages.

    Source: Lu et al., On-policy distillation, Thinking Machines Lab, 2025.
    """
    return np.where(mask, -coefficient * (logprobs.astype(np.float64) - teacher_logprobs), 0)


def _places(groups: Groups) -> tuple[Int[np.ndarray, " episodes"], Int[np.ndarray, " groups"]]:
    """Returns the index of each episode's group, and the number of episodes per group."""
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return place, counts
