"""The loss's distribution against the sampler's own figures, for every sampling setting, on episodes of two actions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.ops import Head
from stack_core.ops.sampling.sampling import SamplingSettings, sample
from stack_rl.contracts import Observation, Trajectory
from stack_rl.environments.cell import CellConfig
from stack_rl.episodes import Attempt, Episode, sampling_for
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.objectives.presets import DrGRPOConfig
from stack_rl.objectives.sampled import SAMPLING_INPUTS, sampled_figures
from stack_rl.packing import PackedRows, row_counts
from stack_rl.sampling import PolicySampling

from ..scripted import Policy
from .test_policy import EMBED, RunningSum

ROWS, VOCAB, SEQ = 32, 12, 15
# Two actions without an observation in between, so that only their starts tell them apart.
PROMPT, ACTIONS, SEEN = 3, (5, 4), 0
CASES = {
    "temperature": PolicySampling(temperature=0.6),
    "min_p": PolicySampling(min_p=0.3),
    "presence": PolicySampling(presence_penalty=1.5),
    "frequency": PolicySampling(frequency_penalty=0.8),
    "repetition": PolicySampling(repetition_penalty=1.7),
    "all": PolicySampling(
        temperature=1.4,
        top_k=9,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.7,
        frequency_penalty=-0.6,
        repetition_penalty=1.3,
    ),
}


def model() -> RunningSum:
    rng = np.random.default_rng(1)
    return RunningSum(
        *(jnp.asarray(rng.normal(0, 0.7, shape), jnp.float32) for shape in ((VOCAB, EMBED), (EMBED, VOCAB)))
    )


def played(policy: Any, sampling: PolicySampling) -> list[Trajectory]:
    """Episodes that the sampler of every engine plays with the model."""
    rng, of_sampler = np.random.default_rng(2), jax.jit(sample, static_argnames="candidates")
    tokens = np.zeros((ROWS, SEQ), np.int32)
    tokens[:, :PROMPT] = rng.integers(VOCAB, size=(ROWS, PROMPT))
    logprobs, candidates = np.zeros((ROWS, SEQ), np.float32), [[()] * SEQ for _ in range(ROWS)]
    length, starts = PROMPT, []
    environment = CellConfig().build(Policy(), seq_tokens=SEQ, seed=0).episode(0)  # only its type is checked
    for count in ACTIONS:
        starts.append(length)
        episode = Episode(Attempt(0, 0), environment, Observation(tokens=(), max_tokens=SEQ))
        params = sampling_for(episode, sampling, seed=0, seq_tokens=SEQ)
        rows = [
            SamplingSettings.row(params, seed=(length, n), end_tokens=(), prompt_tokens=length) for n in range(ROWS)
        ]
        settings = SamplingSettings.unpacked(jnp.asarray(np.stack([each.packed() for each in rows])))
        for _ in range(count):
            hidden = policy(jnp.asarray(tokens), None, jnp.ones((ROWS, SEQ), jnp.int32)).hidden[:, length - 1]
            lengths = jnp.full(ROWS, length)
            drawn = of_sampler(policy.head().logits(hidden), settings, jnp.asarray(tokens), lengths, candidates=True)
            tokens[:, length], logprobs[:, length] = drawn.tokens, drawn.logprobs
            for row, kept in enumerate(np.asarray(drawn.candidates)):
                candidates[row][length] = tuple(np.flatnonzero(kept).tolist())
            length += 1
        length += SEEN
    sampled = np.zeros(SEQ, bool)
    for start, count in zip(starts, ACTIONS, strict=True):
        sampled[start : start + count] = True
    return [
        Trajectory(
            group=row,
            task=0,
            tokens=tokens[row, :length],
            sampled=sampled[:length],
            logprobs=logprobs[row, :length],
            versions=np.zeros(length, np.int32),
            rewards=np.zeros(length, np.float32),
            action_starts=starts,
            candidates=flat(candidates[row][:length]) if sampling.is_narrowed else None,
        )
        for row in range(ROWS)
    ]


def flat(candidates: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.asarray([len(each) for each in candidates], np.int32)
    return counts, np.asarray([token for each in candidates for token in each], np.int32)


def batch_for(trajectories: list[Trajectory], sampling: PolicySampling, seq_tokens: int = SEQ) -> dict[str, np.ndarray]:
    kept = VOCAB if sampling.is_narrowed else 0
    # One row more than trajectories, and one token more than the longest: padding must stay finite.
    shapes = batch_shapes(ROWS + 1, seq_tokens, DrGRPOConfig(), candidates=kept, sampling=sampling)
    return batch_of(trajectories, shapes=shapes, version=0, sampling=sampling)


def largest_mismatch(policy: Any, batch: Any) -> float:
    arrays = {name: jnp.asarray(each) for name, each in batch.items()}

    @jax.jit
    def computed(arrays: Any) -> Any:
        _, metrics = DrGRPOConfig().build()(policy, arrays, key=jax.random.key(0))
        return metrics["largest_mismatch"].value

    return float(computed(arrays))


@pytest.mark.parametrize("case", CASES)
def test_the_ratio_of_every_token_is_one_and_is_not_if_the_loss_leaves_the_setting_out(case: str) -> None:
    policy, sampling = model(), CASES[case]
    batch = batch_for(played(policy, sampling), sampling)
    assert int((batch["targets"] != IGNORED_TARGET).sum()) == ROWS * sum(ACTIONS)
    assert largest_mismatch(policy, batch) < 1e-4
    for left_out in set(SAMPLING_INPUTS) & set(batch) - {"generated_tokens"}:
        rest = {name: each for name, each in batch.items() if name != left_out}
        assert largest_mismatch(policy, rest) > 0.01, left_out
    if sampling.frequency_penalty or sampling.presence_penalty:
        # As if both actions were one.
        merged = batch | {"generated_tokens": batch["generated_tokens"] + 5 * (batch["generated_tokens"] > 0)}
        assert largest_mismatch(policy, merged) > 0.01


@pytest.mark.parametrize("head", [Head, lambda weight: Head(weight, jnp.linspace(-1, 1, VOCAB), 0.5, 3.0)])
def test_heads_with_a_bias_and_a_cap_are_processed_too(head: Any) -> None:
    class Capped(RunningSum):
        def head(self) -> Head:
            return head(self.weight)

    policy, sampling = Capped(model().embedding, model().weight), CASES["temperature"]
    batch = batch_for(played(policy, sampling), sampling)
    assert largest_mismatch(policy, batch) < 1e-4


def test_gradients_and_entropies_are_those_of_the_processed_distribution() -> None:
    """Against the same figures from whole logits in float64 NumPy, with central differences of the weight."""
    policy, sampling = model(), CASES["all"]
    batch = batch_for(played(policy, sampling), sampling)
    drawn = batch["targets"] != IGNORED_TARGET
    arrays = {name: jnp.asarray(each) for name, each in batch.items()}
    hidden = policy(arrays["tokens"], None, arrays["segment_ids"]).hidden

    def total(weight: Any) -> Any:
        logprobs, entropies = sampled_figures(Head(weight), hidden, arrays, entropies=True)
        return jnp.sum(jnp.where(drawn, jnp.sin(logprobs) + jnp.cos(entropies), 0))

    def exact(weight: np.ndarray) -> float:
        result = 0.0
        for row, place in zip(*np.nonzero(drawn), strict=True):
            logits = np.asarray(hidden, np.float64)[row, place] @ weight
            history = batch["tokens"][row, : place + 1]
            seen = np.isin(np.arange(VOCAB), history)
            logits = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
            generated = history[len(history) - batch["generated_tokens"][row, place] :]
            count = np.bincount(generated, minlength=VOCAB)
            logits = (logits + 0.6 * count - 0.7 * (count > 0)) / 1.4
            kept = [token for token in batch["candidates"][row, place] if token >= 0]
            logprobs = logits[kept] - np.log(np.exp(logits[kept]).sum())
            (own,) = logprobs[np.asarray(kept) == batch["targets"][row, place]]
            result += np.sin(own) + np.cos(-(np.exp(logprobs) * logprobs).sum())
        return result

    weight = np.asarray(policy.weight, np.float64)
    assert float(total(policy.weight)) == pytest.approx(exact(weight), rel=1e-5)
    gradient = np.asarray(jax.grad(total)(policy.weight))
    for place in ((0, 3), (2, 7)):
        step = np.zeros_like(weight)
        step[place] = 1e-6
        numeric = (exact(weight + step) - exact(weight - step)) / 2e-6
        assert gradient[place] == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_episodes_that_share_a_row_have_the_figures_of_their_own_rows() -> None:
    policy, sampling = model(), CASES["all"]
    batch = batch_for(played(policy, sampling), sampling, 2 * SEQ)
    assert set(SAMPLING_INPUTS) < set(batch)
    packed = PackedRows.plan(batch["segment_ids"], row_counts(ROWS + 1, 1)).pack(batch)
    assert len(packed["tokens"]) == ROWS // 2 and packed["segment_ids"].max() == 2
    assert (packed["segment_ids"] == 0).any(), "rows end with padding"
    assert largest_mismatch(policy, packed) < 1e-4
    merged = packed | {"segment_ids": np.minimum(packed["segment_ids"], 1)}
    assert largest_mismatch(policy, merged) > 0.01
