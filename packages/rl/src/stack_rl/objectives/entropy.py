"""The entropy of a policy's tokens, part by part, so that logits of all tokens are never in memory together."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.contracts.models import Head

__all__ = ["token_entropies"]


def token_entropies(
    head: Head, hidden: Float[Array, "batch seq embed"], *, most_logits: int = 1 << 24
) -> Float[Array, "batch seq"]:
    """H = -sum_v p_v log p_v of the distribution after each token, in float32.

    Gradients form the logits again.

    Args:
      most_logits: entries of the logits that are formed at a time, as far as one token of each row allows.
    """
    batch, seq, _ = hidden.shape
    most = max(most_logits // (batch * head.weight.shape[-1]), 1)
    tokens = max(size for size in range(1, seq + 1) if seq % size == 0 and size <= most)
    parts = hidden.reshape(batch, seq // tokens, tokens, -1).swapaxes(0, 1)
    return jax.lax.map(jax.checkpoint(partial(_of_part, head)), parts).swapaxes(0, 1).reshape(batch, seq)


def _of_part(head: Head, hidden: Float[Array, "batch part embed"]) -> Float[Array, "batch part"]:
    logprobs = jax.nn.log_softmax(head.logits(hidden), axis=-1)
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
