"""Objectives on pairs: which log-probabilities of the answers reach the loss, and that padding does not."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.models import Outputs
from stack_core.ops import Head
from stack_rl.objectives.preference import DPOConfig, IPOConfig, ORPOConfig, PairConfig, SimPOConfig

VOCAB, EMBED, SEQ = 7, 3, 5


@dataclass(frozen=True)
class Bigrams:
    """A language model whose next token depends on the last one."""

    embedding: Any
    weight: Any
    states: Any = ()

    def __call__(self, tokens: Any, positions: Any, segment_ids: Any = None, cache: Any = None) -> Outputs:
        return Outputs(self.embedding[tokens])

    def head(self) -> Head:
        return Head(self.weight)

    def logits(self, hidden: Any) -> Any:
        return self.head().logits(hidden)


def example() -> tuple[Bigrams, dict[str, np.ndarray]]:
    """Two pairs whose answers have one to four tokens, and one of padding."""
    rng = np.random.default_rng(0)
    arrays = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((VOCAB, EMBED), (EMBED, VOCAB)))
    targets = rng.integers(VOCAB, size=(3, 2, SEQ))
    for place, tokens in {(0, 0): 4, (0, 1): 1, (1, 0): 2, (1, 1): 3, (2, 0): 0, (2, 1): 0}.items():
        targets[place][: SEQ - tokens] = IGNORED_TARGET
    batch = {"tokens": rng.integers(VOCAB, size=(3, 2, SEQ)), "targets": targets}
    batch |= {"positions": np.zeros((3, 2, SEQ)), "segment_ids": np.ones((3, 2, SEQ))}
    batch = {name: values.astype(np.int32) for name, values in batch.items()}
    return Bigrams(*map(jnp.asarray, arrays)), batch | {
        "reference_logprobs": rng.normal(-4, 1, (3, 2)).astype(np.float32)
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(config: PairConfig, sums: np.ndarray, means: np.ndarray, reference: np.ndarray) -> np.ndarray:
    ratios = sums - reference
    margin = ratios[:, 0] - ratios[:, 1]
    if isinstance(config, DPOConfig):
        return -0.9 * np.log(sigmoid(0.3 * margin)) - 0.1 * np.log(sigmoid(-0.3 * margin))
    if isinstance(config, IPOConfig):
        return (margin - 1 / 0.6) ** 2
    if isinstance(config, SimPOConfig):
        return -np.log(sigmoid(1.5 * (means[:, 0] - means[:, 1]) - 0.4))
    odds = np.exp(means) / (1 - np.exp(means))
    return -means[:, 0] - 0.2 * np.log(sigmoid(np.log(odds[:, 0] / odds[:, 1])))


@pytest.mark.parametrize(
    "config",
    [
        DPOConfig(beta=0.3, label_smoothing=0.1),
        IPOConfig(beta=0.3),
        ORPOConfig(weight=0.2),
        SimPOConfig(beta=1.5, gamma=0.4),
    ],
    ids=lambda config: config.name,
)
def test_the_loss_is_the_mean_over_real_pairs(config: PairConfig) -> None:
    model, batch = example()
    logits = np.asarray(model.embedding, np.float64)[batch["tokens"]] @ np.asarray(model.weight, np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logprobs, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    drawn = batch["targets"] != IGNORED_TARGET
    sums = np.where(drawn, picked, 0).sum(-1)[:2]
    means = sums / drawn.sum(-1)[:2]
    losses = expected(config, sums, means, batch["reference_logprobs"][:2].astype(np.float64))

    def loss(weight: jax.Array) -> tuple[jax.Array, Any]:
        return config.build()(Bigrams(model.embedding, weight), jax.tree.map(jnp.asarray, batch), key=jax.random.key(0))

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(model.weight)
    assert value == pytest.approx(losses.mean(), rel=1e-5)
    assert float(metrics["loss"].weight) == 2
    assert float(metrics["margin"]) == pytest.approx(
        float(metrics["reward_chosen"]) - float(metrics["reward_rejected"]), rel=1e-5
    )
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 1e-3


def test_only_objectives_with_a_reference_ask_for_its_scores() -> None:
    assert {
        name for name in (DPOConfig, IPOConfig, ORPOConfig, SimPOConfig) if "reference_logprobs" in name.inputs
    } == {
        DPOConfig,
        IPOConfig,
    }
