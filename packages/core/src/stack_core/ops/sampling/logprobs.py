"""Log-probabilities of tokens, as the model gave them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.generation import TokenLogprob
from stack_core.ops.sampling.candidates import at_token, largest, padded

__all__ = ["MOST_LOGPROBS", "Index", "TokenLogprobs", "token_logprobs", "token_records"]

Index = slice | tuple[slice | int, ...]
"""What selects some rows of an array."""

MOST_LOGPROBS = 20
"""How many of the most likely tokens a request may ask for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Tokens and how likely they were; on the host, arrays of NumPy or lists.

    Attributes:
      tokens: int32[rows].
      logprobs: float32[rows].
      ranks: int32[rows], 1 and how many tokens were more likely.
      top_tokens: int32[rows, MOST_LOGPROBS], the most likely tokens, most likely first; of equal ones the lowest first.
      top_logprobs: float32[rows, MOST_LOGPROBS]; -inf beyond the vocabulary.
    """

    tokens: Any
    logprobs: Any
    ranks: Any
    top_tokens: Any
    top_logprobs: Any


def token_logprobs(logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> TokenLogprobs:
    """How likely each row's token is by its logits, and which are the most likely."""
    logits = padded(logits)
    own = at_token(logits, tokens)
    peak = jnp.max(logits, axis=1)
    norm = jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=1))  # of the logits less the peak, for large ones
    ranks = 1 + jnp.sum(logits > own[:, None], axis=1, dtype=jnp.int32)
    values, top_tokens = largest(logits, MOST_LOGPROBS)
    return TokenLogprobs(tokens, own - peak - norm, ranks, top_tokens, values - peak[:, None] - norm[:, None])


def token_records(figures: TokenLogprobs, index: Index, wanted: int) -> list[TokenLogprob]:
    """The rows of arrays on the host that `index` selects, as values of core's contract.

    Args:
      wanted: how many of the most likely tokens to give beside each.
    """
    tokens, logprobs, ranks = (array[index].tolist() for array in (figures.tokens, figures.logprobs, figures.ranks))
    tops = (array[index][:, :wanted].tolist() for array in (figures.top_tokens, figures.top_logprobs))
    tops = [tuple(zip(*row, strict=True)) for row in zip(*tops, strict=True)]
    return [TokenLogprob(*row) for row in zip(tokens, logprobs, ranks, tops, strict=True)]
