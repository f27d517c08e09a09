"""Short causal convolution before a recurrence, with the last inputs as its state."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["convolve", "mask_taps", "next_tail", "segment_starts"]


def convolve(
    inputs: Float[Array, "batch tokens features"],
    kernel: Float[Array, "features size"],
    taps: Bool[Array, "batch seq size"] | None,
) -> Float[Array, "batch seq features"]:
    """Computes the depthwise convolution y_t = sum_k w_k x_(t + k).

    Args:
      inputs: x, [batch, size - 1 + seq, features].
      kernel: w, [features, size].
      taps: mask of the products; None includes all.
    """
    size = kernel.shape[-1]
    seq = inputs.shape[1] - size + 1
    products = [inputs[:, tap : tap + seq] * kernel[:, tap] for tap in range(size)]
    if taps is not None:
        products = [jnp.where(taps[:, :, tap, None], product, 0) for tap, product in enumerate(products)]
    return sum(products[1:], start=products[0])


def next_tail(
    inputs: Float[Array, "batch tokens features"], seq: int, valid: Bool[Array, "batch seq"] | None
) -> Float[Array, "batch tail features"]:
    """Returns the last inputs, the state for the next tokens.

    Args:
      inputs: the last tail, followed by `seq` new tokens.
      seq: number of new tokens.
      valid: mask of real tokens, a prefix of each row; None for all.
    """
    if valid is None:
        # Includes old inputs if there are fewer new tokens than the convolution has taps.
        return inputs[:, seq:]
    # Rows end at different tokens, so each row's tail is cut after its own valid tokens.
    ends, tokens = jnp.sum(valid, axis=1), inputs.shape[1] - seq
    return jax.vmap(lambda row, end: jax.lax.dynamic_slice_in_dim(row, end, tokens))(inputs, ends)


def mask_taps(
    segment_ids: Int[Array, "batch seq"] | None, size: int, before: Int[Array, "batch tail"] | None = None
) -> Bool[Array, "batch seq size"] | None:
    """Returns a mask of the last `size` tokens up to each token that share its segment.

    Args:
      segment_ids: segment of each token; None for rows of one segment.
      size: number of tokens, the token itself included.
      before: segments of the tokens before each row, at least size - 1; None at the start of a sequence.
    """
    if segment_ids is None:
        return None
    if before is None:  # -1 is the segment of no token
        before = jnp.full((segment_ids.shape[0], size - 1), -1, segment_ids.dtype)
    padded = jnp.concatenate([before[:, before.shape[1] - size + 1 :], segment_ids], axis=1)
    seq = segment_ids.shape[1]
    return jnp.stack([padded[:, tap : tap + seq] == segment_ids for tap in range(size)], axis=-1)


def segment_starts(
    segment_ids: Int[Array, "batch seq"] | None, before: Int[Array, "batch tail"] | None = None
) -> Bool[Array, "batch seq"] | None:
    """Returns a mask of the first tokens of segments, or None without segments.

    Args:
      segment_ids: segment of each token.
      before: segments of the tokens before each row; None at the start of a sequence.
    """
    if segment_ids is None:
        return None
    prepended: Any = -1 if before is None else before[:, -1:]
    return jnp.diff(segment_ids, axis=1, prepend=prepended) != 0
