"""Objectives: a model's forward composed with a pure function of arrays."""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat

from stack_core import ops
from stack_core.config import config
from stack_core.protocols import LanguageModel, Objective

__all__ = ["IGNORED_TARGET", "CausalLMConfig"]

IGNORED_TARGET = -100


@config
class CausalLMConfig:
    """Next-token cross-entropy, the mean over the targets that are not ignored.

    Attributes:
      z_loss: coefficient of mean(log Z ** 2), which keeps the logits' scale in place (PaLM, section 5).
    """

    name: Literal["causal_lm"] = "causal_lm"
    z_loss: NonNegativeFloat = 0.0

    def build(self) -> Objective:
        def objective(
            model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array
        ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
            del key  # a dense decoder without dropout draws nothing
            hidden = model(batch["tokens"], batch["positions"], batch["segment_ids"])
            targets = batch["targets"]
            loss = ops.linear_cross_entropy(
                hidden, model.head_weight(), targets, ignore_index=IGNORED_TARGET, z_loss=self.z_loss
            )
            return loss, {"loss": loss, "weight": jnp.sum(targets != IGNORED_TARGET).astype(jnp.float32)}

        return objective
