"""Gradients and metrics of a batch with pipeline stages."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import PartitionSpec

from stack_core.abi.metrics import Metrics, combine
from stack_core.runtime.tree_paths import path_name
from stack_train.nn.pipeline import run_stages
from stack_train.nn.schedules import Schedule
from stack_train.step.microbatches import check_metrics, split_batch
from stack_train.variables.model_variables import Path, Tree

__all__ = ["is_in_layers", "staged"]

Objective = Callable[[Tree, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Metrics]]
"""(parameters, batch, key) -> (loss, metrics)."""


def is_in_layers(axes: tuple[str | None, ...]) -> bool:
    """Checks whether a parameter with these logical axes is stacked over layers."""
    return axes[:1] == ("layers",)


def staged(
    objective: Objective,
    params: Tree,
    axes: Mapping[Path, tuple[str | None, ...]],
    shardings: Tree,
    batch: Mapping[str, jax.Array],
    key: jax.Array,
    schedule: Schedule,
    *,
    gradients: bool,
) -> tuple[Tree | None, Metrics]:
    """Computes the gradients of microbatches averaged by the weights of their losses, and their combined metrics.

    Args:
      axes: logical axes of each parameter.
      shardings: sharding of each parameter.
      key: PRNG key, split over the microbatches.
      gradients: computes gradients; False returns None instead.
    """
    flat, specs = flatten_mapping(params), flatten_mapping(shardings)
    paths = {path_name(path): path for path in flat}
    layers, shared = (
        {name: flat[path] for name, path in paths.items() if is_in_layers(axes[path]) == stacked}
        for stacked in (True, False)
    )
    keys = jax.random.key_data(jax.random.split(key, schedule.microbatches))
    rows = (jax.tree.map(lambda x: split_batch(x, schedule.microbatches), dict(batch)), keys)

    def of_microbatch(piece: Tree, shared: Tree, row: Any) -> tuple[jax.Array, Metrics]:
        tree = unflatten_mapping({paths[name]: leaf for name, leaf in {**piece, **shared}.items()})
        loss, metrics = objective(tree, row[0], jax.random.wrap_key_data(row[1]))
        check_metrics(metrics)
        # The sum of weighted losses is divided below by the total weight, which no single microbatch has.
        weight = jax.lax.stop_gradient(jnp.asarray(metrics["loss"].weight))
        return loss * weight.astype(loss.dtype), metrics

    # Pieces lead with [chunks, layers of a piece] in the place of [layers].
    of_layers = {name: PartitionSpec(None, None, *specs[paths[name]].spec[1:]) for name in layers}
    of_shared = {name: specs[paths[name]].spec for name in shared}
    stacked, sums = run_stages(
        of_microbatch, layers, shared, rows, schedule, gradients=gradients, specs=(of_layers, of_shared)
    )
    metrics = {name: combine(metric) for name, metric in stacked.items()}
    if sums is None:
        return None, metrics
    total = metrics["loss"].weight
    # As in `accumulate`: a batch without targets gives 0 instead of NaN.
    total = jnp.where(total == 0, 1, total)
    found = {paths[name]: x / total.astype(x.dtype) for part in sums for name, x in part.items()}
    return unflatten_mapping(found), metrics
