"""Sums and means over the tokens of each sequence; a packed row holds several sequences."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["sequence_mean", "sequence_sum"]


def sequence_sum(
    values: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"], segment_ids: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Computes S_t, the sum of values over the tokens in `mask` of t's sequence, in float32 or wider.

    Args:
      values: one value per token.
      mask: tokens sampled by the policy.
      segment_ids: sequence of each token within its row, at most `seq`; 0 is padding.
    """
    segments = values.shape[-1] + 1

    def of_row(values: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, ids, num_segments=segments)[ids]

    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.float32)  # in bfloat16, 256 + 1 is 256
    return jax.vmap(of_row)(jnp.where(mask, wide, 0), segment_ids)


def sequence_mean(
    values: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"], segment_ids: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Computes M_t, the mean of values over the tokens in `mask` of t's sequence; 0 if the mask is empty there."""
    counts = sequence_sum(jnp.ones_like(values), mask, segment_ids)
    return sequence_sum(values, mask, segment_ids) / jnp.maximum(counts, 1)
