"""Log-probabilities of targets under their sampling distributions."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.data import IGNORED_TARGET
from stack_core.ops import Head
from stack_core.ops.sampling.penalties import penalize
from stack_rl.objectives.candidates import among_candidates
from stack_rl.objectives.entropy import token_entropies
from stack_rl.objectives.parts import MAX_LOGITS, by_parts

__all__ = ["SAMPLING_INPUTS", "SampledFigures", "sampled_figures"]

SAMPLING_INPUTS: Final = ("candidates", "temperature", "penalties", "generated_tokens")
"""Batch arrays that describe how targets were sampled. A batch without one was sampled without that setting."""

_Batch = Mapping[str, jax.Array]


class SampledFigures(NamedTuple):
    """Log-probabilities of the targets, and entropies of the distributions if requested, all [batch, seq]."""

    logprobs: Float[Array, "batch seq"]
    entropies: Float[Array, "batch seq"] | None


def sampled_figures(
    head: Head, hidden: Float[Array, "batch seq embed"], batch: _Batch, *, entropies: bool = False
) -> SampledFigures:
    """Computes log q(target) and the entropy of q, the policy's sampling distribution.

        q = softmax(penalized(z) / T) over the candidates K

    The logits z are the policy's, processed in the order of `SamplingParams`: repetition, frequency and presence
    penalties, temperature, candidates. The logits of the complete batch are never in memory. A target without
    candidates, in a batch with candidates, gets 0.

    Args:
      head: output head of the policy.
      hidden: hidden states before the head.
      batch: batch with `tokens`, `targets`, `segment_ids`, and an array of SAMPLING_INPUTS for each setting in use:
        candidates: int32[batch, seq, candidates], token ids of K, padded with -1.
        temperature: float32[batch, seq], T.
        penalties: float32[batch, seq, 3], repetition, frequency and presence penalty.
        generated_tokens: int32[batch, seq], with penalties: number of tokens sampled in the same action before the
          target. Frequency and presence penalties count these tokens, the repetition penalty all of the segment.
      entropies: compute entropies as well.
    """
    temperature = batch.get("temperature")
    # The temperature is moved to the hidden states, which are linear in the logits unless there is a bias or a cap.
    is_linear = head.bias is None and head.softcap is None
    if "penalties" in batch or (temperature is not None and not is_linear):
        return _of_processed_logits(head, hidden, batch, entropies=entropies)
    if temperature is not None:
        hidden = (hidden.astype(jnp.float32) / _divisor(temperature)[..., None]).astype(hidden.dtype)
    if "candidates" in batch:
        # Ignored targets are -100, not a token id; callers mask their results.
        found = among_candidates(head, hidden, jnp.maximum(batch["targets"], 0), batch["candidates"])
        return SampledFigures(found[0], found[1] if entropies else None)
    losses: Any = head.cross_entropy(hidden, batch["targets"], ignore_index=IGNORED_TARGET, reduction="none")
    return SampledFigures(-losses, token_entropies(head, hidden) if entropies else None)


def _of_processed_logits(
    head: Head, hidden: Float[Array, "batch seq embed"], batch: _Batch, *, entropies: bool
) -> SampledFigures:
    """Computes `sampled_figures` from the logits of one chunk of tokens at a time."""
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    rows, seq = tokens.shape
    places = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
    of_tokens = {"targets": jnp.maximum(batch["targets"], 0), "places": places, "segments": segment_ids}
    of_tokens |= {name: batch[name] for name in SAMPLING_INPUTS if name in batch}
    # `by_parts` splits arrays [batch, seq, n].
    parts = {name: each if each.ndim == 3 else each[..., None] for name, each in of_tokens.items()}

    def of_part(head: Head, hidden: jax.Array, *arrays: jax.Array) -> jax.Array:
        part = dict(zip(parts, arrays, strict=True))
        single = {name: each[..., 0] for name, each in part.items()}
        logits, vocab = head.logits(hidden), head.weight.shape[-1]
        if "penalties" in part:
            # The sampler's own function, on one row per target. Tokens of other segments are outside the vocabulary.
            is_own = single["segments"][..., None] == segment_ids[:, None]
            history = jnp.where(is_own, tokens[:, None], vocab).reshape(-1, seq)
            lengths, (repetition, frequency, presence) = single["places"] + 1, jnp.moveaxis(part["penalties"], -1, 0)
            flat = lambda each: each.reshape(-1)
            logits = penalize(
                logits.reshape(-1, vocab),
                history,
                prompt_tokens=flat(lengths - single["generated_tokens"]),
                lengths=flat(lengths),
                # Padding of a batch has 0, by which positive logits would be divided.
                repetition=flat(jnp.where(repetition > 0, repetition, 1)),
                frequency=flat(frequency),
                presence=flat(presence),
            ).reshape(logits.shape)
        if "temperature" in part:
            logits = logits / _divisor(part["temperature"])
        targets, kept, has_some = part["targets"], jnp.ones(logits.shape, bool), jnp.bool_(True)
        if "candidates" in part:
            places = jnp.where(part["candidates"] < 0, vocab, part["candidates"])
            here = jnp.arange(rows)[:, None, None], jnp.arange(places.shape[1])[:, None], places
            kept = jnp.zeros(logits.shape, bool).at[here].set(True, mode="drop")
            has_some = jnp.any(kept, axis=-1)
        # Masked before the exponential; otherwise the gradient of a token without candidates would be NaN.
        logprobs = jax.nn.log_softmax(jnp.where(kept | ~has_some[..., None], logits, -jnp.inf), axis=-1)
        found = jnp.where(has_some, jnp.take_along_axis(logprobs, targets, axis=-1)[..., 0], 0.0)
        if not entropies:
            return found[..., None]
        terms = jnp.where(kept, jnp.exp(logprobs) * jnp.where(kept, logprobs, 0), 0.0)
        return jnp.stack([found, -jnp.sum(terms, axis=-1)], axis=-1)

    # A chunk also has a row of `history` per target.
    most = max(MAX_LOGITS * head.weight.shape[-1] // max(seq, head.weight.shape[-1]), 1)
    found = by_parts(of_part, head, hidden, *parts.values(), max_logits=most)
    return SampledFigures(found[..., 0], found[..., 1] if entropies else None)


def _divisor(temperature: jax.Array) -> jax.Array:
    """Replaces the 0 of padding by 1."""
    return jnp.where(temperature > 0, temperature, 1.0)
