"""Log-probabilities of tokens."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.generation import TokenLogprob
from stack_core.ops.sampling.candidates import at_token, largest, padded

__all__ = ["MOST_LOGPROBS", "Index", "TokenLogprobs", "token_logprobs", "token_records"]

Index = slice | tuple[slice | int, ...]
"""Index of rows in an array."""

MOST_LOGPROBS = 20
"""Maximum number of most likely tokens in a request."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Tokens with log-probabilities and ranks; on the host, NumPy arrays or lists.

    Attributes:
      tokens: int32[rows], the tokens.
      logprobs: float32[rows], their log-probabilities.
      ranks: int32[rows], 1 + number of more likely tokens.
      top_tokens: int32[rows, MOST_LOGPROBS], the most likely tokens in descending order, then by token.
      top_logprobs: float32[rows, MOST_LOGPROBS], their log-probabilities; -inf beyond the vocabulary.
    """

    tokens: Any
    logprobs: Any
    ranks: Any
    top_tokens: Any
    top_logprobs: Any


def token_logprobs(logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> TokenLogprobs:
    """Computes log-probability and rank of each row's token, and the most likely tokens."""
    logits = padded(logits)
    own = at_token(logits, tokens)
    peak = jnp.max(logits, axis=1)
    norm = jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=1))  # relative to the peak, to avoid overflow
    ranks = 1 + jnp.sum(logits > own[:, None], axis=1, dtype=jnp.int32)
    values, top_tokens = largest(logits, MOST_LOGPROBS)
    return TokenLogprobs(tokens, own - peak - norm, ranks, top_tokens, values - peak[:, None] - norm[:, None])


def token_records(figures: TokenLogprobs, index: Index, count: int) -> list[TokenLogprob]:
    """Converts the rows of host arrays selected by `index` to `TokenLogprob` records.

    Args:
      count: number of most likely tokens to include in each record.
    """
    tokens, logprobs, ranks = (array[index].tolist() for array in (figures.tokens, figures.logprobs, figures.ranks))
    tops = (array[index][:, :count].tolist() for array in (figures.top_tokens, figures.top_logprobs))
    tops = [tuple(zip(*row, strict=True)) for row in zip(*tops, strict=True)]
    return [TokenLogprob(*row) for row in zip(tokens, logprobs, ranks, tops, strict=True)]
