"""QK-clip: bounds attention logits by scaling the query and key projections of single heads after an update.

    gamma_h = tau / S_h if S_h > tau, else 1

S_h is the largest logit of head h in a step, over all microbatches and devices, and tau is
`optimizer.qk_clip`. Factors of the updated projections multiply the logits of the head by gamma_h. See
`clip_factors` of the layers for the shares of queries and keys.

Source: Kimi Team, Kimi K2: Open Agentic Intelligence, 2025 (arXiv:2507.20534), section 2.1. Departures: the source has
multi-head latent attention only. Here other attention is clipped too, and a soft cap is applied after the clipped
logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.runtime.tree_paths import path_name
from stack_train.nn.max_logits import ClipsLogits
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.step.trainable import TrainableModel
from stack_train.variables.model_variables import Path

__all__ = ["QKClip", "qk_clip_of"]

Logits = Mapping[str, jax.Array]
"""Largest logits, float32[repeats, heads], by the path of their attention layer."""


@dataclass(frozen=True, eq=False)
class QKClip:
    """QK-clip of the attention layers of a model.

    Attributes:
      threshold: tau.
      model: the trained model.
    """

    threshold: float
    model: TrainableModel

    @cached_property
    def layers(self) -> Mapping[Path, ClipsLogits]:
        """The attention layers of the abstract model."""
        return dict(_attention_layers(self.model.abstract))

    def empty(self) -> Logits:
        """Returns the largest logits before the first microbatch."""
        return {path_name(path): layer.recorder()[...] for path, layer in self.layers.items()}

    def attach(self, model: nnx.Module, logits: Logits) -> None:
        """Lets the attention layers of a model raise these logits."""
        for path, layer in _attention_layers(model):
            layer.max_logits = layer.recorder()
            layer.max_logits[...] = logits[path_name(path)]

    def read(self, model: nnx.Module, before: Logits) -> Logits:
        """Returns the largest logits after the forward pass.

        Raises:
          TrainingError: no attention layer has recorded logits.
        """
        found = {path_name(path): layer.max_logits for path, layer in _attention_layers(model)}
        after = {name: each[...] for name, each in found.items() if each is not None}
        # Identity, because the values are tracers.
        if all(after[name] is before[name] for name in before):
            raise TrainingError(
                "optimizer.qk_clip saw no attention logits, because the objective calls a copy of the model. Call the "
                "model itself, or leave optimizer.qk_clip out."
            )
        return after

    def factors(self, logits: Logits) -> dict[Path, jax.Array]:
        """Returns the factors of the updated parameters, by path."""
        gammas = {name: jnp.where(x > self.threshold, self.threshold / x, 1.0) for name, x in logits.items()}
        return {
            (*path, *parameter): factor
            for path, layer in self.layers.items()
            for parameter, factor in layer.clip_factors(gammas[path_name(path)]).items()
        }

    def metrics(self, logits: Logits) -> Metrics:
        """Returns the largest logit of the step, and the number of clipped heads."""
        largest = jnp.concatenate([x.reshape(-1) for x in logits.values()])
        clipped = jnp.sum(largest > self.threshold).astype(jnp.float32)
        return {"max_logit": Metric.max(jnp.max(largest)), "clipped_heads": Metric.mean(clipped)}


def qk_clip_of(optimizer: Any, model: TrainableModel, unsupported: Mapping[str, bool]) -> QKClip | None:
    """Returns the QK-clip of an optimizer, or None.

    Args:
      unsupported: features that QK-clip does not support, each with True if the step has the feature.

    Raises:
      ConfigError: the step has such a feature, or the model lacks attention layers, or has some without an effect.
    """
    if not isinstance(optimizer, OptimizerConfig) or optimizer.qk_clip is None:
        return None
    clip = QKClip(optimizer.qk_clip, model)
    if reason := next((feature for feature, is_used in unsupported.items() if is_used), None) or _refusal(clip):
        raise ConfigError(f"optimizer.qk_clip is {optimizer.qk_clip:g}, but {reason}. Leave optimizer.qk_clip out.")
    return clip


def _refusal(clip: QKClip) -> str | None:
    """Returns why a model's attention cannot be clipped, or None."""
    if not clip.layers:
        return "the model has no causal attention layer, whose logits it bounds"
    for path, layer in clip.layers.items():
        if reason := layer.clip_refusal():
            return f"it has no effect on {path_name(path)!r}: {reason}"
    ones = {name: jnp.ones(x.shape) for name, x in clip.empty().items()}
    if frozen := sorted(path_name(path) for path in {*clip.factors(ones)} - {*clip.model.variables.paths("trained")}):
        return f"it scales {', '.join(frozen)}, which the run does not train"
    return None


def _attention_layers(model: nnx.Module) -> Iterator[tuple[Path, Any]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, ClipsLogits):
            yield path, module
