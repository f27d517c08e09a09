"""Scores of a batch: a language model's log-probabilities, entropies and values, or a denoiser's predictions."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.models import LanguageModel, Outputs
from stack_core.ops import Head
from stack_train.diffusion.denoiser import Denoiser

__all__ = ["predictions", "scores"]

# 64 MiB of float32 logits at a time.
_MOST_LOGITS = 1 << 24
# Only rollouts have these arrays: experts to replay, and images.
_MODEL_INPUTS = ("experts", "pixels", "grids", "image_mask")


def scores(
    model: LanguageModel,
    batch: Mapping[str, jax.Array],
    *,
    entropy: bool,
    more: Callable[[Any, Outputs, Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None,
) -> dict[str, jax.Array]:
    """Scores the targets of a batch; see `Step.score`.

    Args:
      more: computes additional scores from the model, its outputs and the batch.
    """
    given: dict[str, Any] = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
    outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"], **given)
    targets = batch["targets"]
    losses = model.head().cross_entropy(outputs.hidden, targets, ignore_index=IGNORED_TARGET, reduction="none")
    found = {"logprobs": -losses.astype(jnp.float32)}
    if entropy:
        found["entropy"] = _entropy(model.head(), outputs.hidden)
    if "values" in outputs.facts:
        found["values"] = outputs.facts["values"].astype(jnp.float32)
    return found if more is None else {**found, **more(model, outputs, batch)}


def predictions(model: Denoiser, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the "predictions" of a denoiser for noisy images; see `Step.score`."""
    condition = {name: array for name, array in batch.items() if name not in ("images", "timesteps")}
    return {"predictions": model(batch["images"], batch["timesteps"], condition)}


def _entropy(head: Head, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq"]:
    """Computes -sum_v p_v log p_v of every position in float32, with the logits of one chunk of positions at a time."""
    batch_size, seq, _ = hidden.shape
    # The entropy needs all logits of a position, but positions are independent and can go in chunks.
    most = max(_MOST_LOGITS // (batch_size * head.weight.shape[-1]), 1)
    # The largest divisor, because `lax.map` needs chunks of equal size.
    tokens = max(size for size in range(1, seq + 1) if seq % size == 0 and size <= most)

    def of_part(part: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(head.logits(part), axis=-1)
        return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    parts = hidden.reshape(batch_size, seq // tokens, tokens, -1).swapaxes(0, 1)
    return jax.lax.map(of_part, parts).swapaxes(0, 1).reshape(batch_size, seq)
