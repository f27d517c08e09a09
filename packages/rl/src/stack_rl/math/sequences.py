"""Sums and means over the tokens of a sequence, of which a packed row holds several."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["sequence_mean", "sequence_sum"]


def sequence_sum(
    values: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"], segment_ids: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """S_t = sum of the values of t's sequence, over the tokens in `mask`; float32 at least.

    Args:
      mask: the tokens that the policy drew.
      segment_ids: the sequence of each token within its row, at most `seq`; 0 is padding.
    """
    segments = values.shape[-1] + 1

    def of_row(values: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, ids, num_segments=segments)[ids]

    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.float32)  # in bfloat16, 256 + 1 is 256
    return jax.vmap(of_row)(jnp.where(mask, wide, 0), segment_ids)


def sequence_mean(
    values: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"], segment_ids: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """M_t = mean of the values of t's sequence, over the tokens in `mask`; 0 in a sequence without one."""
    counts = sequence_sum(jnp.ones_like(values), mask, segment_ids)
    return sequence_sum(values, mask, segment_ids) / jnp.maximum(counts, 1)
