"""Algorithms by their names alone: each one's gradient is its paper's, and no two have the same."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited, update_batch
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.objectives.presets import (
    CISPOConfig,
    DAPOConfig,
    DistillConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforceConfig,
    RLOOConfig,
)
from stack_rl.objectives.scalar import ScalarHead
from stack_rl.objectives.settings import Correction, Overlong
from stack_rl.updates import check_minibatches, mean_kl, update_rows

from .test_policy import EMBED, VOCAB, RunningSum, model

SEQ, PROMPT, LIMIT = 12, 2, 8
LENGTHS, GROUPS = (3, 1, 7, 2, 8, 5, 4, 6), (0, 0, 0, 0, 1, 1, 1, 1)
REWARDS = (1.0, 0.0, 0.25, 0.75, 0.5, 1.0, 0.0, 0.0)
SEVERAL = {"epochs": 2, "minibatches": 1}
"""Two updates on the same rows, so that all algorithms are compared on one batch, in its second update."""

ALGORITHMS: Mapping[str, PolicyConfig] = {
    "grpo": GRPOConfig(),
    "dr_grpo": DrGRPOConfig(),
    "dapo": DAPOConfig(**SEVERAL),
    "gspo": GSPOConfig(**SEVERAL),
    "cispo": CISPOConfig(**SEVERAL),
    "rloo": RLOOConfig(),
    "reinforce_pp": ReinforceConfig(),
    "ppo": PPOConfig(**SEVERAL),
}


@dataclass(frozen=True)
class Sampled:
    """Answers of uneven lengths, with log-probabilities of all policies involved, each [answers][tokens]."""

    trajectories: list[Trajectory]
    tokens: list[np.ndarray]
    behaviour: list[np.ndarray]
    old: list[np.ndarray]
    values: list[np.ndarray]


def log_softmax(weight: np.ndarray, embedding: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of a RunningSum's answer to the prompt, in NumPy float64."""
    logits = np.cumsum(embedding[tokens[:-1]], axis=0) @ weight
    shifted = logits - logits.max(axis=1, keepdims=True)
    normal = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.take_along_axis(normal, tokens[1:, None], axis=1)[PROMPT - 1 :, 0]


def arrays(of: RunningSum) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(of.weight, np.float64), np.asarray(of.embedding, np.float64)


def sampled() -> Sampled:
    """Answers drawn by a sampler that differs a little from the policy before the first update."""
    rng, before = np.random.default_rng(7), model()
    weight, embedding = arrays(before)
    trajectories, tokens, behaviour, old, values = [], [], [], [], []
    for length, group, reward in zip(LENGTHS, GROUPS, REWARDS, strict=True):
        drawn = rng.integers(VOCAB, size=PROMPT + length)
        logprobs = log_softmax(weight, embedding, drawn).astype(np.float32).astype(np.float64)
        sampler = (logprobs + rng.normal(0, 0.1, length)).astype(np.float32)
        is_sampled = np.arange(PROMPT + length) >= PROMPT
        trajectories.append(
            Trajectory(
                group=group,
                task=group,
                tokens=drawn.astype(np.int32),
                sampled=is_sampled,
                logprobs=np.concatenate([np.zeros(PROMPT, np.float32), sampler]),
                versions=np.where(is_sampled, 0, -1).astype(np.int32),
                rewards=np.asarray([*[0.0] * (PROMPT + length - 1), reward], np.float32),
                limit_tokens=LIMIT,
            )
        )
        tokens.append(drawn), behaviour.append(sampler.astype(np.float64)), old.append(logprobs)
        values.append(rng.normal(0.4, 0.3, length).astype(np.float32).astype(np.float64))
    return Sampled(trajectories, tokens, behaviour, old, values)


DATA = sampled()
EMBEDDING = arrays(model())[1]
MOVED = arrays(model())[0] + np.random.default_rng(1).normal(0, 0.15, (EMBED, VOCAB))
"""The policy's head after the first update."""
REFERENCE = arrays(model(5))
KERNEL = np.random.default_rng(2).normal(0, 0.3, EMBED)


def laid_out(parts: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((len(parts), SEQ), np.float32)
    for row, part in enumerate(parts):
        found[row, PROMPT - 1 : PROMPT - 1 + len(part)] = part
    return found


def batch(algorithm: PolicyConfig) -> dict[str, jax.Array]:
    """The batch of the second update, through the code of a run."""
    rows = len(DATA.trajectories)
    reference = [log_softmax(*REFERENCE, tokens) for tokens in DATA.tokens]
    scores = {"policy_logprobs": DATA.old, "values": DATA.values, "reference_logprobs": reference}
    arrays = {name: laid_out(each) for name, each in scores.items()}
    whole = batch_of(DATA.trajectories, shapes=batch_shapes(rows, SEQ, algorithm), version=0)
    whole = credited(whole, DATA.trajectories, algorithm, arrays)
    found = update_batch(whole, np.arange(rows), DATA.trajectories, algorithm)
    return {name: jnp.asarray(each, jnp.float64 if each.dtype == np.float32 else None) for name, each in found.items()}


def step(algorithm: PolicyConfig, weight: np.ndarray = MOVED) -> tuple[np.ndarray, dict[str, float]]:
    """The gradient of an algorithm by the head's weight, and its metrics."""
    with jax.enable_x64(True):
        given, objective = batch(algorithm), algorithm.build()
        auxiliary: dict[str, Any] = {}
        if "reference" in objective.auxiliary_models:
            auxiliary["reference"] = RunningSum(jnp.asarray(REFERENCE[1]), jnp.asarray(REFERENCE[0]))
        if "critic" in objective.auxiliary_models:
            head = ScalarHead(SimpleNamespace(embed=EMBED), key=jax.random.key(0))
            head.kernel.set_value(jnp.asarray(KERNEL))
            auxiliary["critic"] = head

        def loss(weight: jax.Array) -> Any:
            of = RunningSum(jnp.asarray(EMBEDDING), weight)
            return objective(of, given, key=jax.random.key(0), **auxiliary)

        gradient, metrics = jax.grad(loss, has_aux=True)(jnp.asarray(weight))
        return np.asarray(gradient), {name: float(each) for name, each in metrics.items()}


def of_groups(per_group: Callable[[np.ndarray], np.ndarray], rewards: np.ndarray) -> np.ndarray:
    return np.concatenate([per_group(rewards[np.asarray(GROUPS) == group]) for group in (0, 1)])


def whitened(parts: list[np.ndarray]) -> list[np.ndarray]:
    every = np.concatenate(parts)
    return [(part - every.mean()) / np.sqrt(every.var() + 1e-8) for part in parts]


def clip(ratio: Any, advantage: Any, low: float, high: float) -> Any:
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def expected_loss(  # noqa: PLR0911  one return a paper
    name: str, weight: np.ndarray, held: list[np.ndarray]
) -> float:
    """The loss of a paper, written for each answer on its own in NumPy.

    Args:
      name: the algorithm.
      weight: the head's weight, by which the loss is differentiated.
      held: log-probabilities whose gradient the paper stops.
    """
    rewards, answers = np.asarray(REWARDS), len(LENGTHS)
    logprobs = [log_softmax(weight, EMBEDDING, tokens) for tokens in DATA.tokens]
    reference = [log_softmax(*REFERENCE, tokens) for tokens in DATA.tokens]
    k1 = [mu - ref for mu, ref in zip(DATA.behaviour, reference, strict=True)]
    normalized = of_groups(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6), rewards)
    # The correction of a sampler: the ratio of the policy before the first update to the sampler, at most 2.
    before = held if name in ("grpo", "dr_grpo", "rloo", "reinforce_pp") else DATA.old
    sampler = [np.minimum(np.exp(p - mu), 2.0) for p, mu in zip(before, DATA.behaviour, strict=True)]
    on_policy = [np.exp(p - h) for p, h in zip(logprobs, held, strict=True)]
    ratios = [np.exp(p - old) for p, old in zip(logprobs, DATA.old, strict=True)]
    tokens = sum(LENGTHS)
    if name == "grpo":
        losses = [c * clip(r, a, 0.2, 0.2) for c, r, a in zip(sampler, on_policy, normalized, strict=True)]
        k3 = [np.exp(ref - p) - (ref - p) - 1 for p, ref in zip(logprobs, reference, strict=True)]
        return sum((loss + 0.04 * k).mean() for loss, k in zip(losses, k3, strict=True)) / answers
    if name == "dr_grpo":
        advantages = of_groups(lambda r: r - r.mean(), rewards)
        losses = [c * clip(r, a, 0.2, 0.2) for c, r, a in zip(sampler, on_policy, advantages, strict=True)]
        return sum(loss.sum() for loss in losses) / (answers * SEQ)
    if name == "dapo":
        # LIMIT is 8, so the last fifth of it is 1.6 tokens: 7 tokens cost 0.375, and 8 cost 1.
        charged = rewards - np.clip((np.asarray(LENGTHS) - 6.4) / 1.6, 0, 1)
        advantages = of_groups(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6), charged)
        losses = [c * clip(r, a, 0.2, 0.28) for c, r, a in zip(sampler, ratios, advantages, strict=True)]
        return sum(loss.sum() for loss in losses) / tokens
    if name == "gspo":
        lengths = [np.exp(np.log(r).mean()) for r in ratios]
        losses = [c * clip(s, a, 3e-4, 4e-4) for c, s, a in zip(sampler, lengths, normalized, strict=True)]
        return sum(loss.mean() for loss in losses) / answers
    if name == "cispo":
        weights = [np.clip(np.exp(h - mu), 0, 5) for h, mu in zip(held, DATA.behaviour, strict=True)]
        return -sum((w * a * p).sum() for w, a, p in zip(weights, normalized, logprobs, strict=True)) / tokens
    if name == "rloo":
        shaped = rewards - 0.05 * np.asarray([each.sum() for each in k1])
        advantages = of_groups(lambda r: r - (r.sum() - r) / (len(r) - 1), shaped)
        return -sum((c * a * p).sum() for c, a, p in zip(sampler, advantages, logprobs, strict=True)) / answers
    if name == "reinforce_pp":
        returns = [r - 0.01 * np.cumsum(k[::-1])[::-1] for r, k in zip(rewards, k1, strict=True)]
        advantages = whitened(returns)
        losses = [c * clip(r, a, 0.2, 0.2) for c, r, a in zip(sampler, on_policy, advantages, strict=True)]
        return sum(loss.sum() for loss in losses) / tokens
    assert name == "ppo"
    estimates = []
    for reward, values in zip(rewards, DATA.values, strict=True):
        deltas = np.append(values[1:], 0) - values + np.append(np.zeros(len(values) - 1), reward)
        estimates.append(
            np.asarray([sum(0.95**later * delta for later, delta in enumerate(deltas[t:])) for t in range(len(deltas))])
        )
    total = 0.0
    for c, ratio, advantage, estimate, old, each in zip(
        sampler, ratios, whitened(estimates), estimates, DATA.values, DATA.tokens, strict=True
    ):
        policy = clip(ratio, advantage, 0.2, 0.2)
        policy = np.where(advantage < 0, np.minimum(policy, -3 * advantage), policy)
        value = np.cumsum(EMBEDDING[each[:-1]], axis=0)[PROMPT - 1 :] @ KERNEL
        returns, near = estimate + old, old + np.clip(value - old, -0.2, 0.2)
        total += (c * policy + 0.5 * np.maximum((value - returns) ** 2, (near - returns) ** 2) / 2).sum()
    return total / tokens


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_a_name_is_its_papers(name: str) -> None:
    """On a batch of uneven lengths, by central differences of the paper's loss in NumPy float64."""
    held = [log_softmax(MOVED, EMBEDDING, tokens) for tokens in DATA.tokens]
    expected, size = np.zeros_like(MOVED), 1e-6
    for place in np.ndindex(MOVED.shape):
        moved = np.zeros_like(MOVED)
        moved[place] = size
        sides = [expected_loss(name, MOVED + sign * moved, held) for sign in (1, -1)]
        expected[place] = (sides[0] - sides[1]) / (2 * size)
    found, _ = step(ALGORITHMS[name])
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-7)


DIFFERENCES: Mapping[tuple[str, str], str] = {
    ("grpo", "dr_grpo"): "division by the standard deviation and by the length; KL divergence in the loss",
    ("grpo", "dapo"): "weight of an answer; higher clip bound; penalty on long answers; KL divergence in the loss",
    ("grpo", "gspo"): "ratio of a token or of an answer; KL divergence in the loss",
    ("grpo", "cispo"): "clipped tokens have no gradient or a bounded one; weight of an answer; KL divergence",
    ("grpo", "rloo"): "standard deviation; sum over an answer; KL divergence in the loss or in the reward",
    ("grpo", "reinforce_pp"): "baseline and deviation of the group or of the batch; KL divergence in the reward",
    ("grpo", "ppo"): "a baseline per answer or the critic's per token",
    ("dr_grpo", "dapo"): "standard deviation; 1 / max_tokens or 1 / N; penalty on long answers",
    ("dr_grpo", "gspo"): "standard deviation; ratio of a token or of an answer",
    ("dr_grpo", "cispo"): "standard deviation; clipped tokens have no gradient or a bounded one",
    ("dr_grpo", "rloo"): "baseline with or without the own reward; KL divergence in the reward",
    ("dr_grpo", "reinforce_pp"): "baseline of the group or of the batch; KL divergence in the reward",
    ("dr_grpo", "ppo"): "a baseline per answer or the critic's per token",
    ("dapo", "gspo"): "ratio of a token or of an answer; weight of an answer; penalty on long answers",
    ("dapo", "cispo"): "clipped tokens have no gradient or a bounded one; penalty on long answers",
    ("dapo", "rloo"): "standard deviation; ratio; penalty on long answers; KL divergence in the reward",
    ("dapo", "reinforce_pp"): "baseline of the group or of the batch; penalty on long answers",
    ("dapo", "ppo"): "a baseline per answer or the critic's per token; penalty on long answers",
    ("gspo", "cispo"): "ratio of an answer or of a token; clipped answers have no gradient",
    ("gspo", "rloo"): "ratio of an answer; standard deviation; KL divergence in the reward",
    ("gspo", "reinforce_pp"): "ratio of an answer; baseline of the batch; KL divergence in the reward",
    ("gspo", "ppo"): "ratio of an answer or of a token; the critic's baseline",
    ("cispo", "rloo"): "standard deviation; bounded ratio; KL divergence in the reward",
    ("cispo", "reinforce_pp"): "baseline of the group or of the batch; bounded or clipped ratio",
    ("cispo", "ppo"): "clipped tokens have a bounded gradient or none; the critic's baseline",
    ("rloo", "reinforce_pp"): "baseline of the group or of the batch; KL divergence per answer or per token ahead",
    ("rloo", "ppo"): "a baseline per answer or the critic's per token",
    ("reinforce_pp", "ppo"): "mean of the batch or the critic as the baseline; KL divergence in the reward",
}


@pytest.mark.parametrize(("pair", "reason"), [*DIFFERENCES.items()], ids=lambda value: str(value)[:40])
def test_two_names_have_two_gradients(pair: tuple[str, str], reason: str) -> None:
    """Also up to a factor, which a learning rate would undo."""
    first, second = (step(ALGORITHMS[name])[0].ravel() for name in pair)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert cosine < 1 - 1e-4, f"{pair} have one gradient in spite of: {reason}"


def test_every_pair_of_names_is_compared() -> None:
    assert set(DIFFERENCES) == set(itertools.combinations(ALGORITHMS, 2))


FAMILY = ("grpo", "dr_grpo", "dapo", "reinforce_pp")
"""Names whose token losses are the same function, so that they differ by their parts alone."""


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(FAMILY, 2)])
def test_two_names_with_the_same_parts_are_one_algorithm(first: str, second: str) -> None:
    """Two updates a batch, since clip bounds are refused with one; a part of the KL divergence needs one."""
    pair = [replace(ALGORITHMS[name], **SEVERAL) for name in (first, second)]
    source, other = sorted(pair, key=lambda each: -each.kl)
    parts = {each.name: getattr(source, each.name) for each in fields(source) if each.name != "name"}
    np.testing.assert_array_equal(step(replace(other, **parts))[0], step(source)[0])
    assert (step(other)[0] != step(source)[0]).any()


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "ppo"])
def test_clipped_tokens_are_counted_as_numpy_counts_them(name: str) -> None:
    algorithm, count = ALGORITHMS[name], 0
    with jax.enable_x64(True):
        advantages = np.asarray(batch(algorithm)["advantages"])
    for row, (tokens, old, mu) in enumerate(zip(DATA.tokens, DATA.old, DATA.behaviour, strict=True)):
        logprobs = log_softmax(MOVED, EMBEDDING, tokens)
        if name == "cispo":
            count += int((np.exp(logprobs - mu) > 1.3).sum())
            continue
        ratio = np.exp(logprobs - old)
        ratio = np.full_like(ratio, np.exp(np.log(ratio).mean())) if name == "gspo" else ratio
        of_row = advantages[row, PROMPT - 1 : PROMPT - 1 + len(tokens) - PROMPT]
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "ppo": (0.2, 0.2)}[name]
        count += int((((of_row > 0) & (ratio > 1 + high)) | ((of_row < 0) & (ratio < 1 - low))).sum())
    algorithm = replace(algorithm, highest=1.3) if isinstance(algorithm, CISPOConfig) else algorithm
    _, metrics = step(algorithm)
    assert count > 0
    assert metrics["clipped"] * sum(LENGTHS) == pytest.approx(count, abs=1e-6)


def test_ratios_are_one_before_the_first_update_and_nothing_is_clipped() -> None:
    before, _ = arrays(model())
    for name in ("dapo", "gspo", "ppo"):
        _, metrics = step(ALGORITHMS[name], before)
        assert metrics["clipped"] == 0 and abs(metrics["update_kl"]) < 1e-12, name
        assert 0.05 < metrics["mismatch"] < 0.2  # the sampler's


def test_updates_visit_every_row_once_an_epoch_in_another_order() -> None:
    algorithm = DAPOConfig(epochs=2, minibatches=4)
    rows = [update_rows(16, algorithm, seed=(3, 5), update=update) for update in range(8)]
    for epoch in (rows[:4], rows[4:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(16))
    assert [each.tolist() for each in rows[:4]] != [each.tolist() for each in rows[4:]]
    again = update_rows(16, algorithm, seed=(3, 5), update=6)
    assert again.tolist() == rows[6].tolist()


def test_the_divergence_that_stops_updates_is_of_sampled_tokens() -> None:
    targets = np.asarray([[1, -100, 2]])
    log_ratio = np.asarray([[0.5, 9.0, -0.25]])
    expected = np.mean([np.expm1(0.5) - 0.5, np.expm1(-0.25) + 0.25])
    assert mean_kl({"targets": targets}, log_ratio, np.zeros((1, 3))) == pytest.approx(expected)
    assert mean_kl({"targets": np.full((1, 3), -100)}, log_ratio, np.zeros((1, 3))) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPOConfig(advantage="gae"), "grpo has no critic, which 'gae' reads. Choose objective.name: ppo"),
        (lambda: PPOConfig(advantage="group"), "ppo trains a critic, which only 'gae' reads"),
        (lambda: GRPOConfig(clip_high=0.3), "in which all ratios are 1, so objective.clip_high would have no effect"),
        (lambda: CISPOConfig(minibatches=1, correction=Correction(), highest=4.0), "objective.highest would have no"),
        (lambda: GRPOConfig(target_kl=0.1), "A batch has one update, so objective.target_kl would have no effect"),
        (lambda: PPOConfig(epochs=1, minibatches=1, value_clip=0.1), "objective.value_clip would have no effect"),
        (lambda: RLOOConfig(epochs=2, correction=None), "the loss of rloo has no ratio"),
        (lambda: DrGRPOConfig(kl_in="reward"), "objective.kl is 0, so objective.kl_in would have no effect"),
        (lambda: RLOOConfig(kl_estimator="k3"), "only k1 has the gradient of the KL divergence"),
        (lambda: ReinforceConfig(kl_corrected=True), "kl_corrected would have no effect with kl_in: reward"),
        (lambda: DistillConfig(refill_rounds=2), "distill ignores rewards, so objective.refill_rounds"),
        (lambda: DistillConfig(kl_in="reward", kl_estimator="k1"), "distill ignores rewards"),
        (lambda: DistillConfig(epochs=2), "a second update no longer has"),
        (lambda: CISPOConfig(lowest=6.0), "Give lowest < highest"),
        (lambda: Overlong(kind="mask", buffer_fraction=0.5), "buffer_fraction would have no effect with kind: mask"),
        (lambda: check_minibatches(12, DAPOConfig()), "16, which does not divide the 12 episodes .* 1, 2, 3, 4, 6, 12"),
    ],
)
def test_a_part_that_does_not_act_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_run_says_what_differs_from_the_paper() -> None:
    assert DAPOConfig().build().notes == ("dapo as in its paper",)
    title, *parts = GRPOConfig(kl=0.0, entropy=0.05, overlong=Overlong()).build().notes
    assert title == "grpo, with other settings than in its paper:"
    assert parts[:2] == ["  objective.kl: 0.0 (grpo has 0.04)", "  objective.entropy: 0.05 (grpo has 0.0)"]
    assert parts[2].startswith("  objective.overlong: {'kind': 'penalize'") and len(parts) == 3
