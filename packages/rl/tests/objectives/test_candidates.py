"""Log-probabilities within candidates, against the softmax over a masked vocabulary, and in the objectives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.generation import SamplingParams
from stack_core.ops import Head
from stack_core.ops.sampling.sampling import SamplingSettings, sample
from stack_rl.objectives.candidates import among_candidates
from stack_rl.objectives.presets import GRPOConfig

from .test_policy import EMBED, RunningSum

VOCAB, KEPT = 7, 5


def case() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, a head's weight, targets and their candidates; the last token has none."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, VOCAB))
    candidates = np.full((2, 3, KEPT), -1)
    for place in np.ndindex(2, 3):
        count = rng.integers(1, KEPT + 1)
        candidates[place][:count] = rng.choice(VOCAB, count, replace=False)
    candidates[1, 2] = -1
    arrays = (jnp.asarray(each, jnp.float32) for each in (hidden, weight))
    return *arrays, jnp.asarray(np.maximum(candidates[..., 0], 0)), jnp.asarray(candidates)


@pytest.mark.parametrize(("scale", "softcap", "biased"), [(1.0, None, False), (0.5, 3.0, True)])
def test_they_are_those_of_the_softmax_over_the_candidates_and_so_are_gradients(
    scale: float, softcap: float | None, biased: bool
) -> None:
    hidden, weight, targets, candidates = case()
    bias = jnp.linspace(-1, 1, VOCAB) if biased else None

    def ours(weight: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        return among_candidates(Head(weight, bias, scale, softcap), hidden, targets, candidates)

    def whole(weight: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = jnp.any(candidates[..., None] == jnp.arange(VOCAB), axis=-2).at[1, 2].set(True)
        logprobs = jax.nn.log_softmax(jnp.where(kept, Head(weight, bias, scale, softcap).logits(hidden), -1e9))
        found = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        entropies = -jnp.sum(jnp.where(kept, jnp.exp(logprobs) * logprobs, 0), axis=-1)
        return found.at[1, 2].set(0.0), entropies.at[1, 2].set(0.0)

    for found, right in zip(ours(weight, hidden), whole(weight, hidden), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)

    def summed(arguments: Any, function: Any) -> jax.Array:
        logprobs, entropies = function(*arguments)
        return jnp.sum(jnp.sin(logprobs)) + jnp.sum(jnp.cos(entropies))

    for found, right in zip(*(jax.grad(summed)((weight, hidden), each) for each in (ours, whole)), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_bfloat16_head_are_summed_in_float32() -> None:
    """Of 2,048 tokens with the same target a sum in bfloat16 forgets most."""
    rng, narrow = np.random.default_rng(0), jnp.bfloat16
    hidden, weight = (jnp.asarray(1 + rng.normal(0, 0.1, shape), narrow) for shape in ((8, 256, 4), (4, VOCAB)))
    targets = jnp.ones((8, 256), jnp.int32)
    candidates = jnp.broadcast_to(jnp.asarray([1, 2, 3], jnp.int32), (8, 256, 3))

    def total(head: Head, hidden: jax.Array) -> jax.Array:
        return jnp.sum(among_candidates(head, hidden, targets, candidates)[0])

    head, wide = (Head(weight.astype(dtype), jnp.zeros(VOCAB, dtype)) for dtype in (narrow, jnp.float32))
    found, right = jax.grad(total)(head, hidden), jax.grad(total)(wide, hidden.astype(jnp.float32))
    for ours, exact in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert float(jnp.linalg.norm(ours.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)) < 0.01


def test_no_array_has_all_logits() -> None:
    hidden, weight, targets, candidates = case()
    program = jax.make_jaxpr(lambda weight: among_candidates(Head(weight), hidden, targets, candidates))(weight)
    assert "[2,3,7]" not in str(program)
    assert "[7,2,3]" not in str(program)


def test_with_top_p_the_mean_ratio_is_one_among_the_candidates_and_the_kept_mass_without_them() -> None:
    """The sampler's own draws; 4,096 tokens behind random prefixes."""
    rng, rows, seq, vocab = np.random.default_rng(1), 256, 16, 64
    arrays = (jnp.asarray(rng.normal(0, 0.6, shape), jnp.float32) for shape in ((vocab, EMBED), (EMBED, vocab)))
    model = RunningSum(*arrays)
    tokens = jnp.asarray(rng.integers(vocab, size=(rows, seq)), jnp.int32)
    segments = jnp.ones_like(tokens)
    logits = model.logits(model(tokens, None, segments).hidden).reshape(rows * seq, vocab)
    params = SamplingParams(top_p=0.9, logprobs=0, logprobs_of="processed")
    of_rows = [SamplingSettings.row(params, seed=(0, n), end_tokens=(), prompt_tokens=0) for n in range(rows * seq)]
    settings = SamplingSettings.unpacked(jnp.asarray(np.stack([each.packed() for each in of_rows])))
    history, lengths = jnp.zeros((rows * seq, 1), jnp.int32), jnp.zeros(rows * seq, jnp.int32)
    drawn = jax.jit(sample, static_argnames="candidates")(logits, settings, history, lengths, candidates=True)
    kept = np.asarray(drawn.candidates)
    assert kept[np.arange(rows * seq), drawn.tokens].all()
    assert kept.sum(1).min() < kept.sum(1).max() < vocab

    candidates = np.full((rows * seq, vocab), -1, np.int32)
    for row, places in enumerate(map(np.flatnonzero, kept)):
        candidates[row, : len(places)] = places
    batch = {"tokens": tokens, "targets": drawn.tokens.reshape(rows, seq), "segment_ids": segments}
    batch |= {"positions": segments, "behaviour_logprobs": drawn.logprobs.reshape(rows, seq)}
    batch |= dict.fromkeys(("advantages", "weights"), jnp.ones((rows, seq)))
    batch |= dict.fromkeys(("share", "real", "dropped"), jnp.ones(rows))
    replayed = batch | {"candidates": jnp.asarray(candidates.reshape(rows, seq, vocab))}
    assert int((batch["targets"] == IGNORED_TARGET).sum()) == 0

    objective = GRPOConfig(kl=0.0, entropy=0.1).build()
    with_them, without = (objective(model, each, key=jax.random.key(0))[1] for each in (replayed, batch))
    assert abs(float(with_them["ratio"].value) - 1) <= 0.002
    assert float(with_them["largest_mismatch"].value) < 1e-4
    mass = float(jnp.sum(jnp.where(kept, jax.nn.softmax(logits), 0), axis=1).mean())
    assert float(without["ratio"].value) == pytest.approx(mass, rel=1e-4)
    assert 0.9 <= mass < 0.93
    assert float(with_them["entropy"].value) < float(without["entropy"].value)
