"""Weights of tokens in the loss, computed on the host over the whole batch of an update.

The loss is sum_t w_t l_t over all sampled tokens, however they are laid out. Packing, microbatches, accumulation and
sharding therefore cannot change its gradient.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from jaxtyping import Float, Int

__all__ = ["WEIGHTS", "token_weights"]

Lengths = Int[np.ndarray, " sequences"]
Groups = Int[np.ndarray, " sequences"]
Weights = Float[np.ndarray, " sequences"]


def _token(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    return np.full(len(lengths), 1 / max(lengths.sum(), 1))


def _sequence(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    return 1 / (max(np.count_nonzero(lengths), 1) * np.maximum(lengths, 1))


def _constant(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    return np.full(len(lengths), 1 / (max(len(lengths), 1) * max_tokens))


def _sequence_sum(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    return np.full(len(lengths), 1 / max(np.count_nonzero(lengths), 1))


def _prompt(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    of_group, place = np.unique(groups, return_inverse=True)
    tokens = np.bincount(place, weights=lengths, minlength=len(of_group))
    return 1 / (max(np.count_nonzero(tokens), 1) * np.maximum(tokens, 1)[place])


def _sum(lengths: Lengths, groups: Groups, max_tokens: int) -> Weights:
    return np.ones(len(lengths))


WEIGHTS: Final[Mapping[str, Callable[[Lengths, Groups, int], Weights]]] = {
    "token": _token,
    "sequence": _sequence,
    "constant": _constant,
    "sequence_sum": _sequence_sum,
    "prompt": _prompt,
    "sum": _sum,
}


def token_weights(name: str, lengths: Lengths, groups: Groups, *, max_tokens: int) -> Weights:
    """Computes the weight of every token of each sequence.

        token:    1 / N                  N = sum of all lengths; DAPO (arXiv:2503.14476), equation 8
        sequence: 1 / (B lengths[i])     B sequences that have a token; GRPO (arXiv:2402.03300), equation 3
        constant: 1 / (B max_tokens)    B sequences; Dr. GRPO (arXiv:2503.20783), so that long answers count in full
        sequence_sum: 1 / B              B sequences that have a token; RLOO (arXiv:2402.14740), equation 6
        prompt:   1 / (P N_g)            P groups, N_g tokens of the group; ScaleRL (arXiv:2510.13786)
        sum:      1                      a plain sum over tokens

    Args:
      name: name of a weighting above.
      lengths: number of sampled tokens in each sequence of the update, over all devices and microbatches.
      groups: prompt of each sequence, as arbitrary numbers.
      max_tokens: maximum number of tokens of an answer; a constant of the run, not the width of a batch.
    """
    return WEIGHTS[name](lengths, groups, max_tokens)
