"""Functions of logits, part by part, so that logits of all tokens are never in memory together."""

from collections.abc import Callable
from typing import Final

import jax
from jaxtyping import Array, Float

__all__ = ["MOST_LOGITS", "by_parts"]

MOST_LOGITS: Final = 1 << 24
"""Entries of the logits that are formed at a time."""


def by_parts(
    function: Callable[..., Float[Array, "batch part"]],
    *hidden: Float[Array, "batch seq _"],
    vocab: int,
    most_logits: int = MOST_LOGITS,
) -> Float[Array, "batch seq"]:
    """`function` of parts of the tokens of each of `hidden`; gradients compute it again.

    Args:
      vocab: entries of the logits that it forms of a token.
      most_logits: that it forms at a time, as far as one token of each row allows.
    """
    batch, seq, _ = hidden[0].shape
    most = max(most_logits // (batch * vocab), 1)
    tokens = max(size for size in range(1, seq + 1) if seq % size == 0 and size <= most)
    parts = tuple(each.reshape(batch, seq // tokens, tokens, -1).swapaxes(0, 1) for each in hidden)
    found = jax.lax.map(jax.checkpoint(lambda part: function(*part)), parts)
    return found.swapaxes(0, 1).reshape(batch, seq)
