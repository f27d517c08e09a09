"""The reward model and KTO against NumPy, their gradients against central differences."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_rl.objectives.kto import KTOConfig
from stack_rl.objectives.reward_model import RewardModelConfig
from stack_rl.objectives.scalar import ScalarHead

from .test_preference import EMBED, SEQ, VOCAB, Bigrams, sigmoid

RNG = np.random.default_rng(1)
EMBEDDING, WEIGHT, KERNEL = (RNG.normal(0, 1, shape) for shape in ((VOCAB, EMBED), (EMBED, VOCAB), (EMBED,)))
TOKENS = RNG.integers(VOCAB, size=(4, 2, SEQ))
TARGETS = RNG.integers(VOCAB, size=(4, 2, SEQ))
TARGETS[:, :, :2] = IGNORED_TARGET  # prompts of two tokens
TARGETS[0, 0, 4:] = TARGETS[1, 1, 3:] = TARGETS[3] = IGNORED_TARGET  # shorter answers, and a row of padding
REFERENCE = RNG.normal(-9, 2, (4, 2))
DESIRABLE = np.array([1.0, 0.0, 1.0, 0.0])


def batch() -> dict[str, jax.Array]:
    whole = {"tokens": TOKENS, "targets": TARGETS, "positions": 0 * TOKENS, "segment_ids": 0 * TOKENS + 1}
    arrays = {name: jnp.asarray(values, jnp.int32) for name, values in whole.items()}
    return arrays | {"reference_logprobs": jnp.asarray(REFERENCE), "desirable": jnp.asarray(DESIRABLE)}


def head(kernel: Any) -> ScalarHead:
    made = ScalarHead(SimpleNamespace(embed=EMBED), key=jax.random.key(0))
    made.kernel.set_value(jnp.asarray(kernel))
    return made


def differences(loss: Any, x: np.ndarray) -> np.ndarray:
    """Central differences of a function of an array."""
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        found[place] = (loss(x + step) - loss(x - step)) / 2e-6
    return found


def expected_reward_loss(kernel: np.ndarray) -> float:
    last = [[np.flatnonzero(TARGETS[row, answer] != IGNORED_TARGET).max() for answer in (0, 1)] for row in range(3)]
    rewards = np.array(
        [[EMBEDDING[TOKENS[row, each, last[row][each]]] @ kernel for each in (0, 1)] for row in range(3)]
    )
    gap = rewards[:, 0] - rewards[:, 1]
    return float(np.mean(-np.log(sigmoid(gap - 0.2)) + 0.05 * rewards.sum(1) ** 2))


def test_a_reward_model_minimizes_the_loss_of_bradley_and_terry() -> None:
    config = RewardModelConfig(margin=0.2, centre=0.05)
    assert list(config.build().auxiliary_models) == ["reward"]
    with jax.enable_x64(True):
        model = Bigrams(jnp.asarray(EMBEDDING), jnp.asarray(WEIGHT))

        def loss(kernel: jax.Array) -> Any:
            return config.build()(model, batch(), key=jax.random.key(0), reward=head(kernel))

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(KERNEL))
    assert float(value) == pytest.approx(expected_reward_loss(KERNEL), rel=1e-6)
    np.testing.assert_allclose(gradient, differences(expected_reward_loss, KERNEL), rtol=1e-5, atol=1e-9)
    assert float(metrics["loss"].weight) == 3
    assert float(metrics["margin"]) == pytest.approx(
        float(metrics["reward_chosen"]) - float(metrics["reward_rejected"]), rel=1e-6
    )


def log_ratios(weight: np.ndarray) -> np.ndarray:
    logits = EMBEDDING[TOKENS] @ weight
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logprobs, np.maximum(TARGETS, 0)[..., None], -1)[..., 0]
    return (np.where(TARGETS != IGNORED_TARGET, picked, 0).sum(-1) - REFERENCE)[:3]


def expected_kto_loss(weight: np.ndarray, baseline: float) -> float:
    gains = 0.3 * (log_ratios(weight)[:, 0] - baseline)
    good = DESIRABLE[:3] > 0
    return float(np.mean(np.where(good, 1.2 * (1 - sigmoid(gains)), 0.8 * (1 - sigmoid(-gains)))))


def test_kto_minimizes_the_loss_of_its_paper() -> None:
    config = KTOConfig(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    weight = WEIGHT.astype(np.float32).astype(np.float64)
    baseline = max(log_ratios(weight)[:, 1].mean(), 0.0)
    assert baseline > 0.1
    with jax.enable_x64(True):

        def loss(weight: jax.Array) -> Any:
            return config.build()(Bigrams(jnp.asarray(EMBEDDING), weight), batch(), key=jax.random.key(0))

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(weight))
    assert float(value) == pytest.approx(expected_kto_loss(weight, baseline), rel=1e-5)
    held = differences(lambda each: expected_kto_loss(each, baseline), weight)
    np.testing.assert_allclose(gradient, held, rtol=1e-4, atol=1e-6)
    assert float(metrics["baseline"]) == pytest.approx(baseline, rel=1e-5)
    assert {name: float(metrics[name].weight) for name in ("loss", "reward_desirable", "reward_undesirable")} == {
        "loss": 3,
        "reward_desirable": 2,
        "reward_undesirable": 1,
    }
