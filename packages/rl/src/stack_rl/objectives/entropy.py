"""Entropy of a policy's next-token distributions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.ops import Head
from stack_rl.objectives.parts import MAX_LOGITS, by_parts

__all__ = ["token_entropies"]


def token_entropies(
    head: Head, hidden: Float[Array, "batch seq embed"], *, max_logits: int = MAX_LOGITS
) -> Float[Array, "batch seq"]:
    """Computes H = -sum_v p_v log p_v of the distribution after each token in float32, chunk by chunk."""

    def of_part(head: Head, hidden: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(head.logits(hidden), axis=-1)
        return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    return by_parts(of_part, head, hidden, max_logits=max_logits)
