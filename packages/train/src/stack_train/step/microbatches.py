"""Gradient accumulation over microbatches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.errors import TrainingError
from stack_core.abi.mesh import constrain
from stack_core.abi.metrics import Metric, Metrics, combine
from stack_train.step.precision import add_gradients
from stack_train.variables.model_variables import Tree

__all__ = ["accumulate", "check_metrics", "split_batch"]

Gradients = Callable[[Tree, Mapping[str, jax.Array], jax.Array], tuple[Tree, Metrics, Tree]]
"""(mutable, batch, key) -> (gradients, metrics, mutable)."""


def accumulate(
    gradients: Gradients, zeros: Tree, mutable: Tree, batch: Mapping[str, jax.Array], keys: jax.Array
) -> tuple[Tree, Metrics, Tree]:
    """Averages gradients of microbatches by the weights of their losses, and combines their metrics.

    Returns the gradients, the metrics, and `mutable` after the last microbatch.

    Args:
      gradients: computes the gradients of one microbatch.
      zeros: zeros in the structure of the gradients and the dtype of their sums.
      mutable: variables that the forward pass updates, passed from each microbatch to the next.
      batch: the full batch.
      keys: PRNG keys, [microbatches]. The number of microbatches divides the batch.
    """
    parts = jax.tree.map(lambda x: split_batch(x, len(keys)), dict(batch))

    def add(total: Any, part: Any) -> tuple[Any, Metrics]:
        sums, mutable = total
        # Variables that the forward pass updates pass through the microbatches in order, as through batches.
        grads, metrics, mutable = gradients(mutable, *part)
        return (add_gradients(sums, grads, metrics["loss"].weight), mutable), metrics

    (sums, mutable), stacked = jax.lax.scan(add, (zeros, mutable), (parts, keys))
    metrics = {name: combine(metric) for name, metric in stacked.items()}
    # A batch without targets has weight 0 and zero gradients, so dividing by 1 gives 0 instead of NaN.
    weight = jnp.where(metrics["loss"].weight == 0, 1, metrics["loss"].weight)
    return jax.tree.map(lambda x: x / weight.astype(x.dtype), sums), metrics, mutable


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raises a TrainingError unless an objective's metrics contain a weighted mean loss for averaging."""
    loss = metrics.get("loss")
    if not isinstance(loss, Metric) or loss.combination != "mean":
        raise TrainingError(
            "The objective returns no metric 'loss' that is a mean. Return {'loss': Metric.mean(loss, weight), ...}, "
            "whose weight is what the loss was averaged over (stack_core.abi.metrics)."
        )


def split_batch(x: jax.Array, microbatches: int) -> jax.Array:
    """Reshapes [batch, ...] to [microbatches, rows, ...], with strided rows, which keeps each row on its device."""
    parts = x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)
    return constrain(parts, None, "batch", *[None] * (x.ndim - 1), name="a microbatch")
