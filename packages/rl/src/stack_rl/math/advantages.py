"""Advantages: how much better an episode, or a token, was than expected; computed on the host.

Those of episodes take the reward and the group of each, the prompt that it began with; groups may differ in size.
"""

from collections.abc import Callable, Mapping
from typing import Final

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

# Arguments may be of any real dtype, integers and half precision too; arithmetic and results are float64.
Rewards = Real[np.ndarray, " episodes"]
PerEpisode = Float[np.ndarray, " episodes"]
Groups = Int[np.ndarray, " episodes"]
Tokens = Real[np.ndarray, "batch seq"]
PerToken = Float[np.ndarray, "batch seq"]
Mask = Bool[np.ndarray, "batch seq"]


def centred(rewards: Rewards, groups: Groups) -> PerEpisode:
    """A_i = r_i - mean of the group's rewards.

    Source: Liu et al., Understanding R1-Zero-like training (Dr. GRPO), 2025 (arXiv:2503.20783): a division by the
    standard deviation would weigh groups that are nearly all right or all wrong most.
    """
    place, counts = _places(groups)
    rewards = rewards.astype(np.float64)
    return rewards - (np.bincount(place, weights=rewards) / counts)[place]


def group_normalized(rewards: Rewards, groups: Groups, *, epsilon: float = 1e-6) -> PerEpisode:
    """A_i = (r_i - mean) / (s + e), with s^2 = sum (r - mean)^2 / (G - 1) over the G rewards of a group.

    0 in a group of one, and in a group whose rewards are equal.

    Source: Shao et al., DeepSeekMath (GRPO), 2024 (arXiv:2402.03300), section 4.1.2. Departures: (1) the paper has no
    e; it is 1e-6 in verl and Tunix, 1e-4 in TRL. (2) G - 1, as in PyTorch's `std`; the paper does not say.
    """
    place, counts = _places(groups)
    distance = centred(rewards, groups)
    deviation = np.sqrt(np.bincount(place, weights=distance**2) / np.maximum(counts - 1, 1))
    return distance / (deviation + epsilon)[place]


def leave_one_out(rewards: Rewards, groups: Groups) -> PerEpisode:
    """A_i = r_i - mean of the group's other rewards = G / (G - 1) (r_i - mean); 0 of a group of one.

    Source: Ahmadian et al., Back to basics (RLOO), 2024 (arXiv:2402.14740).
    """
    place, counts = _places(groups)
    return centred(rewards, groups) * (counts / np.maximum(counts - 1, 1))[place]


def whitened(rewards: Rewards, groups: Groups, *, epsilon: float = 1e-8) -> PerEpisode:
    """A_i = (r_i - mean of its group) / (s + e), with the standard deviation s of these distances over all episodes.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262), its variant with the group's baseline. Departures: (1) s is
    that of episodes, not of tokens, as verl has it: an answer's length does not change its share.
    """
    distance = centred(rewards, groups)
    return distance / (np.sqrt(np.mean(distance**2)) + epsilon) if len(distance) else distance


ADVANTAGES: Final[Mapping[str, Callable[[Rewards, Groups], PerEpisode]]] = {
    "group": group_normalized,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "whitened": whitened,
}
"""How episodes are credited, by the names that a run's config selects."""


def equal_groups(rewards: Rewards, groups: Groups) -> Bool[np.ndarray, " episodes"]:
    """Whether all rewards of an episode's group are equal, so that it has no gradient; DAPO draws others instead."""
    place, counts = _places(groups)
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, place, rewards)
    np.maximum.at(highest, place, rewards)
    return (lowest == highest)[place]


def overlong(
    lengths_tokens: Int[np.ndarray, " episodes"], *, most_tokens: int, buffer_tokens: int
) -> Float[np.ndarray, " episodes"]:
    """What DAPO adds to the reward of a long answer: 0 up to L - B tokens, then falling to -1 at L, and -1 beyond.

        (L - B - length) / B between the two, with L = most_tokens and B = buffer_tokens

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), equation 13; in tokens, L = 20480 and B = 4096 there.
    """
    return np.clip((most_tokens - buffer_tokens - lengths_tokens) / buffer_tokens, -1.0, 0.0)


def gae(rewards: Tokens, values: Tokens, mask: Mask, *, discount: float = 1.0, decay: float = 0.95) -> PerToken:
    """A_t = d_t + discount decay A_t', with d_t = r_t + discount V_t' - V_t and t' the next token that was drawn.

    Prompts, observations and padding are no steps of the episode: they are skipped, as if the row had only the tokens
    in `mask`. A row is one episode; its end has the value 0.

    Args:
      rewards: of each token; one that an observation brings is the last token's that was drawn before it.
      values: V_t, what was expected from before token t on.
      mask: the tokens that the policy drew. Advantages of others are 0.
      discount, decay: gamma and lambda; 1 and 0.95 are usual for language models.

    Source: Schulman et al., Generalized advantage estimation, 2015 (arXiv:1506.02438), equation 16.
    """
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    advantages = np.zeros_like(values)
    following, next_value = np.zeros_like(values[:, 0]), np.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        drawn = mask[:, place]
        delta = rewards[:, place] + discount * next_value - values[:, place]
        following = np.where(drawn, delta + discount * decay * following, following)
        next_value = np.where(drawn, values[:, place], next_value)
        advantages[:, place] = np.where(drawn, following, 0)
    return advantages


def whitened_tokens(advantages: Tokens, mask: Mask, *, epsilon: float = 1e-8) -> PerToken:
    """A'_t = (A_t - mean) / sqrt(variance + e), both over the tokens in `mask` of the whole batch; 0 of others.

    Source: Andrychowicz et al., What matters in on-policy reinforcement learning, 2020 (arXiv:2006.05990), section 3.3.
    Departures: (1) the variance divides by the number of tokens, where verl divides by one fewer.
    """
    advantages, count = advantages.astype(np.float64), max(np.count_nonzero(mask), 1)
    distance = np.where(mask, advantages - np.where(mask, advantages, 0).sum() / count, 0)
    return distance / np.sqrt(np.square(distance).sum() / count + epsilon)


def kl_to_go(rewards: Rewards, k1: Tokens, mask: Mask, *, coefficient: float) -> PerToken:
    """A_t = r - coefficient * sum of k1 over the drawn tokens from t on, one episode a row; whiten it over the batch.

    Args:
      rewards: of the episodes, [batch].
      k1: log p - log p_ref of each token, by the policy that drew it.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262).
    """
    ahead = np.cumsum(np.where(mask, k1, 0.0)[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
    return np.where(mask, rewards.astype(np.float64)[:, None] - coefficient * ahead, 0)


def distilled(logprobs: Tokens, teacher_logprobs: Tokens, mask: Mask, *, coefficient: float = 1.0) -> PerToken:
    """A_t = -coefficient (log p(token) - log p_teacher(token)): on-policy distillation as a policy gradient.

    The expected gradient is that of the reverse KL divergence from the teacher at each token, as far as the token's own
    choice goes: later tokens are not credited to it (discount 0).

    Args:
      logprobs: by the policy that drew the tokens.

    Source: Lu et al., On-policy distillation, Thinking Machines Lab, 2025.
    """
    return np.where(mask, -coefficient * (logprobs.astype(np.float64) - teacher_logprobs), 0)


def _places(groups: Groups) -> tuple[Int[np.ndarray, " episodes"], Int[np.ndarray, " groups"]]:
    """The place of each episode's group among all, and how many episodes each group has."""
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return place, counts
