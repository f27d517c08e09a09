"""Per-token changes of logits: masks, biases, and penalties for tokens that already occurred."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

__all__ = ["add_at", "allow", "penalize"]

_CHUNK_TOKENS = 256


def add_at(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows n"], values: Float[Array, "rows n"]
) -> Float[Array, "rows vocab"]:
    """Adds values to the logits of tokens; negative tokens are ignored."""
    rows = jnp.arange(len(logits))[:, None]
    # A negative index would count from the end; an index behind the end is dropped.
    return logits.at[rows, jnp.where(tokens < 0, logits.shape[1], tokens)].add(values, mode="drop")


def allow(logits: Float[Array, "rows vocab"], mask: Int[Array, "rows words"]) -> Float[Array, "rows vocab"]:
    """Sets the logits of tokens without a bit in the mask to -inf; tokens beyond the mask are not allowed."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=mask.dtype)) & 1
    bits = bits.reshape(len(mask), -1)[:, : logits.shape[1]]
    missing = logits.shape[1] - bits.shape[1]
    return jnp.where(jnp.pad(bits, ((0, 0), (0, missing))) != 0, logits, -jnp.inf)


def penalize(
    logits: Float[Array, "rows vocab"],
    history: Int[Array, "rows max_tokens"],
    *,
    prompt_tokens: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
    repetition: Float[Array, " rows"],
    frequency: Float[Array, " rows"],
    presence: Float[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Penalizes tokens that already occurred.

        z' = z / r if z > 0 else z r            if the token occurred in the prompt or the continuation
        z'' = z' - f count - p (count > 0)      count: occurrences in the continuation

    Args:
      history: tokens of each row's prompt and continuation.
      prompt_tokens: number of prompt tokens in each row.
      lengths: number of tokens in each row.
      repetition: r; 1 disables the penalty.
      frequency: f; 0 disables the penalty.
      presence: p; 0 disables the penalty.
    """

    def counts(first: jax.Array, is_penalized: jax.Array) -> jax.Array:
        # Rows without this penalty count nothing, which keeps the loop short.
        return _counts(history, first, jnp.where(is_penalized, lengths, 0), logits.shape[1])

    def repeated(logits: jax.Array) -> jax.Array:
        penalized = jnp.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        return jnp.where(counts(jnp.zeros_like(lengths), repetition != 1) > 0, penalized, logits)

    def generated(logits: jax.Array) -> jax.Array:
        count = counts(prompt_tokens, (frequency != 0) | (presence != 0))
        return logits - frequency[:, None] * count - jnp.where(count > 0, presence[:, None], 0)

    logits = _if_any(repetition != 1, repeated, logits)
    return _if_any((frequency != 0) | (presence != 0), generated, logits)


def _if_any(needed: jax.Array, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    return lax.cond(jnp.any(needed), change, lambda logits: logits, logits)


def _counts(history: jax.Array, first: jax.Array, stop: jax.Array, vocab: int) -> Float[Array, "rows vocab"]:
    """Counts each token in a row of `history` from index `first` (inclusive) to `stop` (exclusive)."""
    rows = jnp.arange(len(history))[:, None]

    def add_chunk(chunk: Any, count: jax.Array) -> jax.Array:
        places = chunk * _CHUNK_TOKENS + jnp.arange(_CHUNK_TOKENS)
        tokens = history.at[:, places].get(mode="fill", fill_value=vocab)
        counted = (first[:, None] <= places) & (places < stop[:, None])
        return count.at[rows, jnp.where(counted, tokens, vocab)].add(1.0, mode="drop")

    # The loop ends with the longest row, which may be much shorter than max_tokens.
    chunks = -(-jnp.max(stop) // _CHUNK_TOKENS)
    return lax.fori_loop(0, chunks, add_chunk, jnp.zeros((len(history), vocab), jnp.float32))
