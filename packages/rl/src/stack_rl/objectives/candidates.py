"""Log-probabilities normalized over the candidates of a sampler with top-p or top-k."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.ops import Head
from stack_core.ops.building import accurate_dtype

__all__ = ["among_candidates"]


def among_candidates(
    head: Head,
    hidden: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    candidates: Int[Array, "batch seq candidates"],
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Computes log p_K(target) over each token's candidates K, and the entropy of that distribution.

        log p_K(t) = z_t - log sum_{k in K} exp z_k, with the logits z of the policy that is trained

    K is the sampler's candidate set, stored with the batch. It cannot be recomputed: after an update, the trained
    policy's own top-p set differs and may lack the target. Without K, the mean ratio to the sampler would be the
    retained probability mass instead of 1. The logits of one candidate per token are computed at a time, and again in
    the backward pass, so logits of the whole vocabulary are never in memory.

    Args:
      head: output head of the policy.
      hidden: hidden states before the head.
      targets: token ids, non-negative.
      candidates: token ids, padded with -1. A token without candidates gets 0.

    Returns:
      Log-probabilities and entropies, both [batch, seq].

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), "keep sampling mask".
    """
    weight = jnp.asarray(head.weight)
    # Widened before the gather: a column is gathered many times, and its gradients must be summed in float32.
    wide = weight.astype(accurate_dtype(weight.dtype))

    def logits(tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq"]:
        columns = jnp.take(wide, jnp.maximum(tokens, 0), axis=1).astype(weight.dtype)
        found = head.scale * jnp.einsum("bse,ebs->bs", hidden, columns, preferred_element_type=jnp.float32)
        if head.bias is not None:
            found = found + jnp.take(head.bias.astype(jnp.float32), jnp.maximum(tokens, 0))
        return found if head.softcap is None else head.softcap * jnp.tanh(found / head.softcap)

    every: Any = jnp.moveaxis(jnp.concatenate([targets[..., None], candidates], axis=-1), -1, 0)
    found = jax.lax.map(jax.checkpoint(logits), every)
    there = every[1:] >= 0
    some = jnp.any(there, axis=0)
    # Masked before the exponential; otherwise the gradient of a token without candidates would be NaN.
    masked = jnp.where(there, found[1:], jnp.where(some, -jnp.inf, 0.0))
    norm = jax.nn.logsumexp(masked, axis=0)
    lower = jnp.where(there, found[1:] - norm, 0.0)
    entropies = -jnp.sum(jnp.where(there, jnp.exp(lower) * lower, 0.0), axis=0)
    return jnp.where(some, found[0] - norm, 0.0), entropies
