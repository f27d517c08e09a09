"""Objectives: a model's forward composed with a pure function of arrays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat

from stack_core.config import config
from stack_core.contracts.data import IGNORED_TARGET, Shapes
from stack_core.contracts.models import LanguageModel
from stack_core.contracts.training import Objective, ReadsInputs
from stack_core.errors import ConfigError, nearest
from stack_core.metrics import Metric, Metrics

__all__ = ["CausalLMConfig", "check_inputs"]


@config
class CausalLMConfig:
    """Next-token cross-entropy, the mean over the targets that are not ignored.

    Attributes:
      z_loss: coefficient of mean(log Z ** 2), which keeps the logits' scale in place (PaLM, section 5).
    """

    name: Literal["causal_lm"] = "causal_lm"
    z_loss: NonNegativeFloat = 0.0

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq")
    )

    def build(self) -> Objective:
        return self

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # a dense decoder without dropout draws nothing
        outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"])
        targets = batch["targets"]
        loss = model.head().cross_entropy(outputs.hidden, targets, ignore_index=IGNORED_TARGET, z_loss=self.z_loss)
        return loss, {"loss": Metric.mean(loss, jnp.sum(targets != IGNORED_TARGET).astype(jnp.float32))}


def check_inputs(objective: Objective, batch: Shapes) -> None:
    """Compares what an objective says that it reads with the arrays of a batch.

    Raises:
      ConfigError: a batch lacks an array, or an array has other axes; names it, and what there is.
    """
    inputs = objective.inputs if isinstance(objective, ReadsInputs) else {}
    sizes: dict[str, tuple[int, str]] = {}
    held = ", ".join(f"{name}{list(array.shape)}" for name, array in batch.items())
    for name, axes in inputs.items():
        if name not in batch:
            raise ConfigError(
                f"The objective reads {name!r} of a batch, which the data does not have.{nearest(name, batch)} A batch "
                f"holds {held}. Choose another data.kind, or another objective."
            )
        shape, names = batch[name].shape, axes.split()
        if len(shape) != len(names):
            raise ConfigError(
                f"The objective reads {name!r} as [{', '.join(names)}], but a batch has {name}{list(shape)}. Choose "
                "another data.kind, or another objective."
            )
        for axis, size in zip(names, shape, strict=True):
            expected, where = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise ConfigError(
                    f"The objective reads {name!r} and {where!r} with one size of {axis}, but the data gives {held}."
                )
