"""Objectives on batches with advantages: the sum that they minimize, and that no layout of it changes the gradient."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError
from stack_core.abi.models import Outputs
from stack_core.ops import Head
from stack_rl.math.advantages import distilled
from stack_rl.math.weights import WEIGHTS, token_weights
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
from stack_rl.objectives.settings import Correction

README = Path(__file__).parents[2] / "README.md"
VOCAB, EMBED, SEQ = 11, 4, 12
PRESETS = (CISPOConfig, DAPOConfig, DrGRPOConfig, GRPOConfig, GSPOConfig, ReinforceConfig, RLOOConfig)


@dataclass(frozen=True)
class RunningSum:
    """A language model whose hidden states are the sums of the embeddings of a sequence's tokens so far."""

    embedding: Any
    weight: Any
    states: Any = ()

    def __call__(self, tokens: Any, positions: Any, segment_ids: Any = None, cache: Any = None) -> Outputs:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        seen = same & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        return Outputs(seen.astype(self.embedding.dtype) @ self.embedding[tokens])

    def head(self) -> Head:
        return Head(self.weight)

    def logits(self, hidden: Any) -> Any:
        return self.head().logits(hidden)


def model(seed: int = 0) -> RunningSum:
    rng = np.random.default_rng(seed)
    return RunningSum(*(jnp.asarray(rng.normal(0, 0.5, shape)) for shape in ((VOCAB, EMBED), (EMBED, VOCAB))))


@dataclass(frozen=True)
class Episode:
    """An answer to a prompt of two tokens."""

    tokens: np.ndarray
    old_logprobs: np.ndarray
    advantage: float
    group: int

    @property
    def length(self) -> int:
        return len(self.old_logprobs)


def episodes() -> list[Episode]:
    rng = np.random.default_rng(3)
    lengths, groups = [3, 1, 4, 2, 3, 1, 2, 4], [0, 0, 1, 1, 2, 2, 2, 0]
    return [
        Episode(rng.integers(VOCAB, size=length + 2), rng.normal(-2.3, 0.4, length), rng.normal(), group)
        for length, group in zip(lengths, groups, strict=True)
    ]


def laid_out(rows: list[list[Episode]], weights: Mapping[int, float], total_rows: int) -> dict[str, jax.Array]:
    """Packs episodes into rows; `weights` is of each token of an episode, by the episode's id."""
    shape = (len(rows), SEQ)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")}
    batch["targets"] = np.full(shape, IGNORED_TARGET, np.int32)
    batch |= {name: np.zeros(shape) for name in ("advantages", "weights", "behaviour_logprobs")}
    batch |= {"share": np.full(len(rows), 1 / total_rows), "real": np.ones(len(rows)), "dropped": np.zeros(len(rows))}
    for row, members in enumerate(rows):
        first = 0
        for segment, episode in enumerate(members, 1):
            here = (row, slice(first, first + len(episode.tokens) - 1))
            drawn = (row, slice(here[1].stop - episode.length, here[1].stop))
            batch["tokens"][here], batch["targets"][drawn] = episode.tokens[:-1], episode.tokens[-episode.length :]
            batch["positions"][here], batch["segment_ids"][here] = np.arange(len(episode.tokens) - 1), segment
            batch["advantages"][drawn], batch["behaviour_logprobs"][drawn] = episode.advantage, episode.old_logprobs
            batch["weights"][drawn] = weights[id(episode)]
            first = here[1].stop
    return {name: jnp.asarray(value) for name, value in batch.items()}


def gradient(config: PolicyConfig) -> Any:
    """A function from microbatches to the gradient of the batch that they make up, added as a trainer adds them."""

    def loss(arrays: Any, batch: Any) -> Any:
        value, metrics = config.build()(RunningSum(*arrays), batch, key=jax.random.key(0))
        return value, metrics["loss"].weight

    differentiated = jax.jit(jax.grad(loss, has_aux=True))

    def added(batches: list[dict[str, jax.Array]]) -> list[np.ndarray]:
        parts = [differentiated((model().embedding, model().weight), batch) for batch in batches]
        shares = sum(share for _, share in parts)
        return [sum(np.asarray(each[i]) * share for each, share in parts) / shares for i in (0, 1)]

    return added


def weights_of(name: str, members: list[Episode]) -> dict[int, float]:
    lengths, groups = np.array([each.length for each in members]), np.array([each.group for each in members])
    return dict(zip(map(id, members), token_weights(name, lengths, groups, max_tokens=6), strict=True))


def test_packed_microbatched_and_reordered_batches_have_one_gradient() -> None:
    members = episodes()
    order = np.random.default_rng(0).permutation(8)
    alone = [[each] for each in members]
    packed = [[members[i] for i in part] for part in np.split(order, 4)]

    def microbatches(rows: list[list[Episode]], weigh: Mapping[int, float]) -> list[dict[str, jax.Array]]:
        return [laid_out(rows[first : first + 2], weigh, len(rows)) for first in range(0, len(rows), 2)]

    with jax.enable_x64(True):
        found = gradient(
            GSPOConfig(
                clip_low=0.3,
                clip_high=0.3,
                minibatches=1,
                epochs=2,
                correction=Correction(level="sequence_mean", high=1.1),
            )
        )
        for name in WEIGHTS:
            weigh = weights_of(name, members)
            expected = found([laid_out(packed, weigh, 4)])
            assert all(np.abs(each).max() > 1e-3 for each in expected)
            for rows in (alone, alone[::-1], packed, packed[::-1], [*packed, [], []]):
                for ours, right in zip(found(microbatches(rows, weigh)), expected, strict=True):
                    np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-9, err_msg=name)


def log_softmax(of: RunningSum, batch: Mapping[str, Any]) -> np.ndarray:
    logits = np.asarray(of(batch["tokens"], None, batch["segment_ids"]).hidden) @ np.asarray(of.weight)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def picked(logprobs: np.ndarray, batch: Mapping[str, Any]) -> np.ndarray:
    return np.take_along_axis(logprobs, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]


def expected_losses(config: PolicyConfig, log_ratio: np.ndarray, logprobs: np.ndarray, batch: Any) -> np.ndarray:
    advantages, ratio = np.asarray(batch["advantages"]), np.exp(log_ratio)
    if isinstance(config, GSPOConfig):
        drawn = np.asarray(batch["targets"]) != IGNORED_TARGET
        ids, ratio = np.asarray(batch["segment_ids"]), ratio.copy()
        for row, segment in np.ndindex(len(ids), SEQ):
            here = (ids[row] == segment + 1) & drawn[row]
            ratio[row, here] = np.exp(log_ratio[row, here].mean()) if here.any() else 1
    if isinstance(config, RLOOConfig):
        return -advantages * logprobs
    if isinstance(config, CISPOConfig):
        return -np.clip(ratio, 0, 5) * advantages * logprobs
    high = {GSPOConfig: 4e-4, DAPOConfig: 0.28}.get(type(config), 0.2)
    low = 3e-4 if isinstance(config, GSPOConfig) else 0.2
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_minimizes_the_loss_of_its_paper(preset: type[PolicyConfig]) -> None:
    members = episodes()
    with jax.enable_x64(True):
        batch = laid_out(
            [[a, b] for a, b in zip(members[::2], members[1::2], strict=True)], weights_of("token", members), 4
        )
        of_loss = {"kl": 0.3, "kl_in": "loss", "kl_estimator": "k3", "kl_corrected": True}
        config = preset(correction=None, epochs=1, minibatches=1, entropy=0.1, **of_loss)
        found, metrics = config.build()(model(), batch, key=jax.random.key(0), reference=model(1))
        ours, theirs = log_softmax(model(), batch), log_softmax(model(1), batch)
        logprobs, reference, drawn = picked(ours, batch), picked(theirs, batch), batch["targets"] != IGNORED_TARGET
        moved = np.where(drawn, logprobs - batch["behaviour_logprobs"], 0)
        divergence = np.exp(moved) * (np.exp(reference - logprobs) - 1 - (reference - logprobs))
        entropies = -(np.exp(ours) * ours).sum(-1)
        losses = expected_losses(config, moved, logprobs, batch) + 0.3 * divergence - 0.1 * entropies
        assert found == pytest.approx(np.sum(np.where(drawn, batch["weights"] * losses, 0)), rel=1e-5)
        for name, values in {"kl": divergence, "entropy": entropies, "mismatch": np.abs(moved)}.items():
            assert metrics[name].value == pytest.approx(values[drawn].mean(), rel=1e-5)
        assert metrics["largest_mismatch"].value == pytest.approx(np.abs(moved).max(), rel=1e-5)


def test_ppo_minimizes_the_losses_of_policy_and_critic() -> None:
    members, rng = episodes(), np.random.default_rng(5)
    kernel = rng.normal(0, 0.5, EMBED)
    config = PPOConfig(correction=None, dual_clip=1.1, value_weight=0.3, value_clip=0.1, kl=0.2, kl_estimator="k2")
    objective = config.build()
    assert list(PPOConfig().build().auxiliary_models) == ["critic"]
    with jax.enable_x64(True):
        batch = laid_out([[each] for each in members], weights_of("token", members), 8)
        batch |= {name: jnp.asarray(rng.normal(0, 0.3, (8, SEQ))) for name in ("old_values", "returns")}
        drawn = np.asarray(batch["targets"] != IGNORED_TARGET)

        def critic(kernel: Any) -> ScalarHead:
            head = ScalarHead(SimpleNamespace(embed=EMBED), key=jax.random.key(0))
            head.kernel.set_value(jnp.asarray(kernel))
            return head

        def loss(kernel: jax.Array) -> Any:
            return objective(model(), batch, key=jax.random.key(0), critic=critic(kernel), reference=model(1))

        (found, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(kernel))
        hidden = np.asarray(model()(batch["tokens"], None, batch["segment_ids"]).hidden)
        scored = objective.scores(model(), Outputs(jnp.asarray(hidden)), batch, critic=critic(kernel))["values"]
        logprobs, reference = (picked(log_softmax(model(seed), batch), batch) for seed in (0, 1))
        old, returns, advantages, weights = (
            np.asarray(batch[name]) for name in ("old_values", "returns", "advantages", "weights")
        )
        ratio = np.exp(np.where(drawn, logprobs - np.asarray(batch["behaviour_logprobs"]), 0))
    kept = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    policy = -np.where(advantages < 0, np.maximum(kept, 1.1 * advantages), kept) + 0.2 * (logprobs - reference) ** 2 / 2

    def expected(kernel: np.ndarray) -> float:
        values = hidden @ kernel
        near = old + np.clip(values - old, -0.1, 0.1)
        of_values = 0.3 * np.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        return float(np.where(drawn, weights * (policy + of_values), 0).sum())

    np.testing.assert_allclose(scored, hidden @ kernel, rtol=1e-6)
    assert float(found) == pytest.approx(expected(kernel), rel=1e-6)
    steps = 1e-6 * np.eye(EMBED)
    differences = [(expected(kernel + step) - expected(kernel - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-9)
    assert float(metrics["value"]) == pytest.approx((hidden @ kernel)[drawn].mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        (DrGRPOConfig(), lambda ratio: np.minimum(ratio, 2.0)),
        (CISPOConfig(highest=1.1, minibatches=1), lambda ratio: np.minimum(ratio, 1.1)),
        (DrGRPOConfig(correction=Correction(high=1.1)), lambda ratio: np.minimum(ratio, 1.1)),
        (
            DAPOConfig(minibatches=1, correction=Correction(kind="mask", low=0.5, high=1.2)),
            lambda ratio: np.where((ratio >= 0.5) & (ratio <= 1.2), ratio, 0),
        ),
    ],
)
def test_a_correction_weighs_tokens_by_what_drew_them(config: PolicyConfig, weight: Any) -> None:
    """The gradient is that of sum w c(p / q) A log p, with c held still."""
    members = episodes()
    with jax.enable_x64(True):
        batch = laid_out([[each] for each in members], weights_of("sum", members), 8)
        drawn = batch["targets"] != IGNORED_TARGET
        ratio = np.exp(picked(log_softmax(model(), batch), batch) - batch["behaviour_logprobs"])
        weights = jnp.asarray(weight(ratio))
        assert (weights != ratio)[drawn].any()
        assert (weights == ratio)[drawn].any()

        def expected(arrays: Any) -> jax.Array:
            of = RunningSum(*arrays)
            hidden = of(batch["tokens"], None, batch["segment_ids"]).hidden
            logprobs = jnp.take_along_axis(
                jax.nn.log_softmax(hidden @ of.weight), jnp.maximum(batch["targets"], 0)[..., None], -1
            )[..., 0]
            return -jnp.sum(jnp.where(drawn, weights * batch["advantages"] * logprobs, 0))

        right = jax.grad(expected)((model().embedding, model().weight))
        for found, each in zip(gradient(config)([batch]), right, strict=True):
            np.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-7)


def test_distillation_is_the_policy_gradient_of_the_teachers_log_ratio() -> None:
    with jax.enable_x64(True):
        members = episodes()
        batch = laid_out([[each] for each in members], weights_of("token", members), 8)
        drawn = np.asarray(batch["targets"] != IGNORED_TARGET)
        own, teacher = (picked(log_softmax(model(seed), batch), batch) for seed in (0, 1))

        def loss(weight: jax.Array, config: PolicyConfig, batch: Any) -> jax.Array:
            of = RunningSum(model().embedding, weight)
            return config.build()(of, batch, key=jax.random.key(0), reference=model(1))[0]

        found = jax.grad(loss)(model().weight, DistillConfig(kl=0.5, reference="run:runs/teacher"), batch)
        credited = {"advantages": jnp.asarray(distilled(own, teacher, drawn, coefficient=0.5))}
        expected = jax.grad(loss)(model().weight, RLOOConfig(correction=None, kl=0.0), batch | credited)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(ConfigError, match="Name the teacher's run"):
        DistillConfig().build()


def test_what_else_the_data_says_of_episodes_is_reported() -> None:
    members = episodes()
    batch = laid_out([members[:2], members[2:4], []], weights_of("token", members), 3)
    batch |= {"reward": jnp.array([1.0, 0.0, 7.0]), "real": jnp.array([1.0, 1.0, 0.0])}
    batch |= {"dropped": jnp.array([0.0, 0.0, 1.0])}
    _, metrics = DrGRPOConfig().build()(model(), batch, key=jax.random.key(0))
    assert (float(metrics["reward"]), float(metrics["dropped"])) == (0.5, 1.0)
    assert 0 < float(metrics["effective_share"]) < 1


def test_only_a_divergence_needs_a_reference() -> None:
    assert GRPOConfig(kl=0.0).build().auxiliary_models == {}
    assert GRPOConfig().build().auxiliary_models == {"reference": "init"}
    built = GRPOConfig(kl=0.1, reference="run:runs/sft").build()
    assert built.auxiliary_models == {"reference": "run:runs/sft"}


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="whose expectation is zero"):
        GRPOConfig(kl=0.1, kl_estimator="k1")
    with pytest.raises(ConfigError, match="low < high"):
        Correction(kind="mask", low=3.0, high=2.0)
    with pytest.raises(ConfigError, match="low only with kind: mask"):
        Correction(low=0.5)


def test_no_array_of_batch_times_tokens_times_vocabulary_is_formed() -> None:
    vocab, seq = 1 << 16, 1024
    tokens = jnp.zeros((2, seq), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "positions"), tokens) | {"segment_ids": tokens + 1}
    batch |= dict.fromkeys(("advantages", "weights", "behaviour_logprobs"), jnp.zeros((2, seq)))
    batch |= dict.fromkeys(("share", "real", "dropped"), jnp.ones(2))
    embedding = jnp.zeros((vocab, EMBED))

    def loss(weight: jax.Array) -> jax.Array:
        of = RunningSum(embedding, weight)
        return GRPOConfig(kl=0.1).build()(of, batch, key=jax.random.key(0), reference=of)[0]

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((EMBED, vocab))))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[(\d[\d,]*)\]", text)]
    assert vocab * EMBED <= max(sizes) < 2 * seq * vocab


def test_an_algorithm_of_ones_own_is_one_function() -> None:
    """The README's: its file is short, and its loss trains."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    source = next(block for block in blocks if "token_losses" in block)
    assert len(source.splitlines()) <= 40
    module: dict[str, Any] = {"__name__": "soft_clip"}
    exec(source, module)
    members = episodes()
    batch = laid_out([[each] for each in members], weights_of("token", members), 8)
    found = (gradient(each(correction=None))([batch]) for each in (module["SoftClip"], DrGRPOConfig))
    for ours, clipped in zip(*found, strict=True):
        assert np.isfinite(ours).all()
        assert np.abs(ours - clipped).max() > 1e-4
