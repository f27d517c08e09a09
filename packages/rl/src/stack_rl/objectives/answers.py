"""Log-probabilities of answers, for objectives on pairs or groups of answers."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.models import LanguageModel

__all__ = ["answer_logprobs"]


def answer_logprobs(model: LanguageModel, batch: Mapping[str, jax.Array]) -> Float[Array, "batch answers"]:
    """Computes log p(answer) = sum over its targets of log p(target | preceding tokens), in float32.

    Args:
      model: language model.
      batch: tokens, targets, positions and segment_ids, int32[batch, answers, seq]; targets are -100 in prompts.
    """
    names = ("tokens", "targets", "positions", "segment_ids")
    batch_size, answers, _ = batch["tokens"].shape
    tokens, targets, positions, segment_ids = (batch[name].reshape(batch_size * answers, -1) for name in names)
    hidden = model(tokens, positions, segment_ids).hidden
    losses = model.head().cross_entropy(hidden, targets, ignore_index=IGNORED_TARGET, reduction="none")
    return -jnp.sum(losses.astype(jnp.float32), axis=-1).reshape(batch_size, answers)
