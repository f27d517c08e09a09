"""The objective of reward models: a scalar score per answer, trained on preference pairs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel
from stack_core.abi.objectives import Objective
from stack_rl.math.preference import accuracy, reward_loss
from stack_rl.objectives.heads import scalar_head

__all__ = ["RewardModelConfig", "answer_rewards"]


def answer_rewards(
    model: LanguageModel, head: Callable[[jax.Array], jax.Array], batch: Mapping[str, jax.Array]
) -> Float[Array, "batch answers"]:
    """Computes r(answer), the head's output at the token before the answer's last target; 0 without a target.

    The last target is the end token. It is a target only, never an input, so it makes no difference whether it is also
    the padding token.

    Args:
      model: language model.
      head: maps hidden states [..., embed] to scalars [...].
      batch: tokens, targets, positions and segment_ids, int32[batch, answers, seq]; targets are -100 in prompts.
    """
    names = ("tokens", "positions", "segment_ids")
    batch_size, answers, seq = batch["tokens"].shape
    tokens, positions, segment_ids = (batch[name].reshape(batch_size * answers, seq) for name in names)
    hidden = model(tokens, positions, segment_ids).hidden
    drawn = (batch["targets"] != IGNORED_TARGET).reshape(batch_size * answers, seq)
    last = jnp.max(jnp.where(drawn, jnp.arange(seq), 0), axis=-1)
    rewards = head(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    return jnp.where(jnp.any(drawn, axis=-1), rewards, 0).reshape(batch_size, answers)


@config
class RewardModelConfig(Objective):
    """A reward model: a head on the hidden state at the answer's end that scores chosen answers above rejected ones.

        l = -log sigmoid(r(chosen) - r(rejected) - margin) + centre (r(chosen) + r(rejected))^2

    The head is the auxiliary model `reward`; the body starts from `run.init_from` and is trained as well. Set
    `data.reference: false` to skip scoring a reference. Rollouts use the trained run as a reward by its address,
    `run:DIRECTORY`.

    Attributes:
      name: selects this objective.
      margin: target difference of the two rewards.
      centre: weight of the penalty that keeps rewards around 0; reward differences alone do not determine the mean.

    Source: Bradley and Terry, 1952, as Ouyang et al., InstructGPT, 2022 (arXiv:2203.02155), equation 1.
    """

    name: Literal["reward_model"] = "reward_model"
    margin: NonNegativeFloat = 0.0
    centre: NonNegativeFloat = 0.01

    shown_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch answers seq")
    )

    @property
    def auxiliary_models(self) -> Mapping[str, Callable[..., Any]]:
        return {"reward": scalar_head}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        rewards = answer_rewards(model, auxiliary["reward"], batch)
        # Padding pairs, which fill the last held-out batch, lack targets and get weight 0.
        real = jnp.any(batch["targets"] != IGNORED_TARGET, axis=(1, 2)).astype(rewards.dtype)
        weight = jnp.sum(real)

        def mean(values: jax.Array) -> Metric:
            return Metric.mean(jnp.sum(values * real) / jnp.maximum(weight, 1.0), weight)

        margin = rewards[:, 0] - rewards[:, 1]
        loss = mean(reward_loss(rewards, margin=self.margin, centre=self.centre))
        return loss.value, {
            "loss": loss,
            "margin": mean(margin),
            "accuracy": mean(accuracy(margin).astype(margin.dtype)),
            "reward_chosen": mean(rewards[:, 0]),
            "reward_rejected": mean(rewards[:, 1]),
        }
