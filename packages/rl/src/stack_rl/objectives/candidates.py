"""Log-probabilities within the candidates that a sampler drew from, such as those of top-p."""

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
    """log p_K(target) of the distribution over a token's candidates K alone, and that distribution's entropy.

        log p_K(t) = z_t - log sum_{k in K} exp z_k, with the logits z of the policy that is trained

    K is what the sampler drew from, kept as it was. The trained policy's own top-p set is another one after a step, and
    may lack the target; without K the ratio to the sampler has the mean of the mass that was kept, not 1. One candidate
    of each token has its logit formed at a time, and again in the backward pass, so that no logits of the whole
    vocabulary are in memory.

    Args:
      candidates: -1 where there are fewer; a token without any gives 0.

    Source: DeepSeek-V3.2, 2025 (arXiv:2512.02556), "keep sampling mask".
    """
    weight = jnp.asarray(head.weight)
    # Cast out here, so that the gradients of a column taken many times are summed in float32.
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
    # Masked before the exponential, so that no gradient is NaN where a token has no candidate.
    masked = jnp.where(there, found[1:], jnp.where(some, -jnp.inf, 0.0))
    norm = jax.nn.logsumexp(masked, axis=0)
    lower = jnp.where(there, found[1:] - norm, 0.0)
    entropies = -jnp.sum(jnp.where(there, jnp.exp(lower) * lower, 0.0), axis=0)
    return jnp.where(some, found[0] - norm, 0.0), entropies
