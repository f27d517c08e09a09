"""Training objectives: the forward pass of a model composed with a loss."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET, Shapes
from stack_core.abi.errors import ConfigError, PluginError, nearest
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel, Outputs
from stack_core.abi.objectives import Objective
from stack_core.ops import Head

__all__ = ["CausalLMConfig", "as_objective", "check_accumulation", "check_inputs", "compares_rows"]

_OTHER_INPUTS = ("pixels", "grids", "source_tokens", "source_segment_ids")


@config
class CausalLMConfig(Objective):
    """Next-token cross-entropy, the mean over the targets that are not ignored, given the source if the data has one.

        loss + balance_loss * balance + router_z_loss * z + mtp_loss * mtp + index_loss * index

    balance and z are the auxiliary losses of mixture-of-experts routers, see `stack_train.nn.experts`. mtp is the mean
    cross-entropy of multi-token prediction (`Outputs.further`), on targets in the same document. index is the mean loss
    of the layers' indexers, see `stack_train.nn.indexer`, which trains only the indexers.

    Attributes:
      name: selects this objective.
      z_loss: coefficient of mean(log Z ** 2), which keeps the scale of the logits stable (PaLM, section 5); 0 is off.
      balance_loss: coefficient of the load-balancing loss; 0.01 in Switch Transformers (arXiv:2101.03961).
      router_z_loss: coefficient that keeps router logits small; 0.001 in ST-MoE (arXiv:2202.08906).
      mtp_loss: coefficient of multi-token prediction; 0.3, then 0.1 in DeepSeek-V3 (arXiv:2412.19437).
      index_loss: coefficient of the loss of indexers, which `model.index_training` computes.
    """

    name: Literal["causal_lm"] = "causal_lm"
    z_loss: NonNegativeFloat = 0.0
    balance_loss: NonNegativeFloat = 0.0
    router_z_loss: NonNegativeFloat = 0.0
    mtp_loss: NonNegativeFloat = 0.0
    index_loss: NonNegativeFloat = 0.0

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"further_loss": "objective.mtp_loss"})
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq")
    )

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # a dense decoder without dropout draws nothing
        if not hasattr(model, "head"):
            raise ConfigError(
                f"objective.name={self.name!r} predicts the next token, and this model has no head: its family is no "
                "language model. Choose another model.name or objective.name."
            )
        # Only data of images or of sources has these arrays, and only their models accept the arguments.
        others: dict[str, Any] = {name: batch[name] for name in _OTHER_INPUTS if name in batch}
        outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"], **others)
        targets, head = batch["targets"], model.head()
        loss = head.cross_entropy(outputs.hidden, targets, ignore_index=IGNORED_TARGET, z_loss=self.z_loss)
        # Microbatches and stages are averaged by their targets, since rows may have very different numbers.
        weight = jnp.sum(targets != IGNORED_TARGET).astype(jnp.float32)
        metrics = {"loss": Metric.mean(loss, weight)}
        parts = {"balance_loss": self.balance_loss, "router_z": self.router_z_loss, "index_loss": self.index_loss}
        parts |= {"index_share": 0.0}  # only reported
        for fact, coefficient in parts.items():
            if fact in outputs.facts:
                # Also with a coefficient of 0, because these numbers show whether the routers are balanced.
                metrics[fact] = Metric.mean(outputs.facts[fact], weight)
            if coefficient:
                loss = loss + coefficient * self._fact(outputs, fact)
        if self.mtp_loss:
            mtp = self._mtp_loss(outputs, head, targets, batch["segment_ids"])
            metrics["mtp_loss"] = Metric.mean(mtp, weight)
            loss = loss + self.mtp_loss * mtp
        return loss, metrics

    def _fact(self, outputs: Outputs, fact: str) -> jax.Array:
        """Returns a fact of the outputs; raises a ConfigError if the model does not report the fact."""
        if fact == "index_loss" and fact not in outputs.facts:
            raise ConfigError(
                f"objective.index_loss={self.index_loss} is the coefficient of the loss of an indexer, and the model "
                "trains none. Set it to 0, or set model.index_training to dense or sparse."
            )
        if fact not in outputs.facts:
            name = "router_z_loss" if fact == "router_z" else fact
            raise ConfigError(
                f"objective.{name}={getattr(self, name)} is a coefficient of the routers of mixtures of experts, but "
                "the model has none. Set it to 0, or choose a family with experts."
            )
        return outputs.facts[fact]

    def _mtp_loss(self, outputs: Outputs, head: Head, targets: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Computes the mean loss of multi-token prediction.

        Raises:
          ConfigError: the model does not support multi-token prediction.
        """
        if not outputs.further:
            raise ConfigError(
                f"objective.mtp_loss={self.mtp_loss} is the coefficient of multi-token prediction, but the model has "
                "no layers for it. Set it to 0, or set model.mtp_layers."
            )
        losses = []
        for depth, hidden in enumerate(outputs.further, 1):
            later = _later(targets, segment_ids, depth)
            losses.append(head.cross_entropy(hidden, later, ignore_index=IGNORED_TARGET))
        return jnp.mean(jnp.stack(losses))


def _later(targets: jax.Array, segment_ids: jax.Array, tokens: int) -> jax.Array:
    """Shifts targets by a number of tokens; ignores targets in another segment or past the end of the row."""
    fill = jnp.full_like(targets[:, :tokens], IGNORED_TARGET)
    later = jnp.concatenate([targets[:, tokens:], fill], axis=1)
    # The fill differs from every segment id, which masks the end of the row.
    segments = jnp.concatenate([segment_ids[:, tokens:], fill], axis=1)
    return jnp.where(segments == segment_ids, later, IGNORED_TARGET)


@dataclass(frozen=True)
class _FunctionObjective(Objective):
    """An `Objective` around a loss function."""

    function: Callable[..., Any]

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        takes_key = "key" in inspect.signature(self.function).parameters
        result = self.function(model, batch, key=key) if takes_key else self.function(model, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        # A function without metrics is averaged over rows, so rows are the weight of its microbatches.
        rows = jnp.float32(next(iter(batch.values())).shape[0])
        return loss, {
            name: metric if isinstance(metric, Metric) else Metric.mean(metric, rows)
            for name, metric in {"loss": loss, **metrics}.items()
        }


def as_objective(objective: Any) -> Objective:
    """Returns an `Objective` unchanged, and wraps a loss function.

    Args:
      objective: `loss(model, batch)` or `loss(model, batch, *, key)` returns a scalar, the mean over the rows of the
        batch, or the scalar and a mapping of metrics: `Metric`s, or scalars that are means over the rows. A loss that
        is averaged over something else returns its weight: `{"loss": Metric.mean(loss, weight)}`.

    Raises:
      PluginError: `objective` is neither.
    """
    if isinstance(objective, Objective):
        return objective
    if callable(objective) and not isinstance(objective, type) and not hasattr(objective, "inputs"):
        return _FunctionObjective(objective)
    raise PluginError(
        f"The objective is {objective!r}; expected a subclass of stack_core.abi.objectives.Objective, or a function "
        "loss(model, batch)."
    )


def compares_rows(objective: Objective) -> bool:
    """Checks whether the loss of a row depends on the other rows of its batch, as in contrastive learning."""
    return getattr(objective, "compares_rows", False)


def check_accumulation(objective: Objective, accumulation_steps: int) -> None:
    """Raises a ConfigError if an objective that compares rows would see only parts of a batch."""
    if accumulation_steps > 1 and compares_rows(objective):
        raise ConfigError(
            f"run.accumulation_steps is {accumulation_steps}, and the objective compares each row with all others of "
            "its batch, which microbatches would separate. Set run.accumulation_steps to 1; model.remat=full takes "
            "less memory, too."
        )


def _expanded(names: Sequence[str], rank: int) -> list[str]:
    """Replaces `*name` by the names of as many axes as an array of this rank has in its place."""
    found: list[str] = []
    for name in names:
        more = max(rank - len(names) + 1, 0)
        found += [f"{name[1:]} {number}" for number in range(more)] if name.startswith("*") else [name]
    return found


def check_inputs(objective: Objective, batch: Shapes) -> None:
    """Checks that a batch has the arrays and axes that an objective declares as inputs.

    Raises:
      ConfigError: the batch lacks an array, or an array has other axes; names the array and lists the batch's arrays.
    """
    sizes: dict[str, tuple[int, str]] = {}
    held = ", ".join(f"{name}{list(array.shape)}" for name, array in batch.items())
    for name, axes in objective.inputs.items():
        if name not in batch:
            raise ConfigError(
                f"The objective reads {name!r} of a batch, which the data does not have.{nearest(name, batch)} A batch "
                f"holds {held}. Choose another data.name, or another objective."
            )
        shape, names = batch[name].shape, _expanded(axes.split(), len(batch[name].shape))
        if len(shape) != len(names):
            raise ConfigError(
                f"The objective reads {name!r} as [{', '.join(names)}], but a batch has {name}{list(shape)}. Choose "
                "another data.name, or another objective."
            )
        for axis, size in zip(names, shape, strict=True):
            expected, where = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise ConfigError(
                    f"The objective reads {name!r} and {where!r} with one size of {axis}, but the data gives {held}."
                )
