"""Scoring function of a language model: the log-probability of each token of a text."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.errors import BundleError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.bundle.exporting import Function

__all__ = ["scoring"]

_MAX_BATCH = 2**16


def scoring(checkpoint: GenerativeCheckpoint, *, batch: Sequence[int], seq: Sequence[int]) -> Function:
    """The function `score`: int32 tokens[batch, seq] -> float32 logprobs[batch, seq], in nats.

    logprobs[:, i] = log p(tokens[:, i] | tokens[:, :i]), and 0 for i = 0. Shorter texts are padded at their end, which
    a causal model does not see.

    Args:
      batch: texts that one program scores together.
      seq: tokens of the longest text of a program.

    Raises:
      BundleError: a size below 1, or more tokens than the model has positions.
    """
    for name, sizes, max_size in (("batch", batch, _MAX_BATCH), ("seq", seq, checkpoint.max_positions)):
        if not sizes or not all(1 <= size <= max_size for size in sizes):
            raise BundleError(
                f"{name} is {', '.join(map(str, sizes)) or 'empty'}; {checkpoint.name!r} takes 1 to {max_size}. "
                f"Set --{name}."
            )

    def score(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        model = checkpoint.model(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden = model(tokens, positions).hidden[:, :-1]
        losses = model.head().cross_entropy(hidden, tokens[:, 1:], reduction="none")
        return {"logprobs": jnp.pad(-losses.astype(jnp.float32), ((0, 0), (1, 0)))}

    shape = ("batch", "seq")
    return Function(score, inputs={"tokens": ("int32", shape)}, sizes={"batch": batch, "seq": seq}, pad={"seq": 0})
