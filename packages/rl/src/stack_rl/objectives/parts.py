"""Chunked evaluation of functions of logits, which bounds the number of logits in memory."""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from stack_core.ops import Head
from stack_core.ops.building import accurate_dtype

__all__ = ["MAX_LOGITS", "by_parts"]

MAX_LOGITS: Final = 1 << 24
"""Default maximum number of logits in memory at a time."""


def by_parts(
    function: Callable[..., Float[Array, "batch part *figures"]],
    head: Head,
    *hidden: Shaped[Array, "batch seq _"],
    max_logits: int = MAX_LOGITS,
) -> Float[Array, "batch seq *figures"]:
    """Maps `function(head, *part)` over chunks of the sequence, with recomputation in the backward pass.

    Args:
      function: computes one or more numbers per token from the head and the chunks of `hidden`.
      head: output head; its gradients are summed over chunks in float32 or wider.
      hidden: arrays to split along the sequence.
      max_logits: maximum number of logits in memory; a chunk has at least one token per row.
    """
    batch, seq, _ = hidden[0].shape
    most = max(max_logits // (batch * head.weight.shape[-1]), 1)
    # The largest chunk that divides the sequence, because `lax.map` needs chunks of equal size.
    tokens = max(size for size in range(1, seq + 1) if seq % size == 0 and size <= most)
    parts = tuple(each.reshape(batch, seq // tokens, tokens, -1).swapaxes(0, 1) for each in hidden)
    # `lax.map` sums the gradients of its constants in their own dtype, so floating-point weights are widened first.
    # Integer codes of a quantized head have no gradient, and widening them would take four times the memory.
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    wide = jax.tree.map(lambda x: x.astype(accurate_dtype(x.dtype)) if is_float(x) else x, head)

    def of_part(part: tuple[jax.Array, ...]) -> jax.Array:
        return function(jax.tree.map(lambda x, original: x.astype(original.dtype), wide, head), *part)

    found = jax.lax.map(jax.checkpoint(of_part), parts)
    return found.swapaxes(0, 1).reshape(batch, seq, *found.shape[3:])
