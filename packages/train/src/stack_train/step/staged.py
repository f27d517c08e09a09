"""Gradients and metrics of a batch with pipeline stages."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import PartitionSpec

from stack_core.abi.metrics import Metrics, combine
from stack_core.runtime.tree_paths import path_name
from stack_train.nn.pipeline import Received, Values, run_stages
from stack_train.nn.schedules import Schedule
from stack_train.step.microbatches import check_metrics, split_batch
from stack_train.variables.model_variables import Kind, ModelVariables, Tree

__all__ = ["is_in_layers", "staged"]

Objective = Callable[[Tree, Received, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Metrics, Tree, Tree]]
"""(variables, message, batch, key) -> (loss, metrics, message to the next piece, mutable variables)."""


def is_in_layers(axes: tuple[str | None, ...]) -> bool:
    """Checks whether a parameter with these logical axes is stacked over layers."""
    return axes[:1] == ("layers",)


def staged(
    objective: Objective,
    variables: ModelVariables,
    values: Tree,
    shardings: Tree,
    batch: Mapping[str, jax.Array],
    key: jax.Array,
    schedule: Schedule,
    *,
    gradients: bool,
) -> tuple[Tree | None, Metrics, Tree]:
    """Computes the gradients of microbatches averaged by the weights of their losses.

    Args:
      variables: structure of the model.
      values: values of all variables.
      shardings: sharding of each trained parameter.
      key: PRNG key, split over the microbatches.
      gradients: computes gradients; False returns None instead, and the given mutable variables.

    Returns:
      The gradients, the combined metrics, and the mutable variables after the last microbatch.
    """
    flat, specs = flatten_mapping(values), flatten_mapping(shardings)
    paths = {path_name(path): path for path in flat}

    def of_kind(kind: Kind, *, divided: bool) -> dict[str, Any]:
        own = {path_name(path) for path in variables.paths(kind) if (path in variables.staged_paths) == divided}
        return {name: flat[path] for name, path in paths.items() if name in own}

    layers, shared = (
        Values(*(of_kind(kind, divided=divided) for kind in ("trained", "mutable", "frozen")))
        for divided in (True, False)
    )
    keys = jax.random.key_data(jax.random.split(key, schedule.microbatches))
    rows = (jax.tree.map(lambda x: split_batch(x, schedule.microbatches), dict(batch)), keys)

    def of_microbatch(piece: Values, shared: Values, received: Received, row: Any) -> Any:
        named = {
            name: x
            for part in (piece, shared)
            for of in (part.trained, part.mutable, part.frozen)
            for name, x in of.items()
        }
        tree = unflatten_mapping({paths[name]: x for name, x in named.items()})
        loss, metrics, sent, moved = objective(tree, received, row[0], jax.random.wrap_key_data(row[1]))
        check_metrics(metrics)
        # The sum of weighted losses is divided below by the total weight, which no single microbatch has.
        weight = jax.lax.stop_gradient(jnp.asarray(metrics["loss"].weight))
        after = {path_name(path): x for path, x in flatten_mapping(moved).items()}
        mutable = tuple({name: after[name] for name in part.mutable} for part in (piece, shared))
        return sent, loss * weight.astype(loss.dtype), metrics, mutable

    # Pieces lead with [chunks, layers of a piece] in the place of [layers].
    of_layers = {name: PartitionSpec(None, None, *specs[paths[name]].spec[1:]) for name in layers.trained}
    of_shared = {name: specs[paths[name]].spec for name in shared.trained}
    stacked, found = run_stages(
        of_microbatch, layers, shared, rows, schedule, gradients=gradients, specs=(of_layers, of_shared)
    )
    metrics = {name: combine(metric) for name, metric in stacked.items()}
    if found is None:
        return None, metrics, variables.select(flat, "mutable")
    total = metrics["loss"].weight
    # As in `accumulate`: a batch without targets gives 0 instead of NaN.
    total = jnp.where(total == 0, 1, total)
    sums = {paths[name]: x / total.astype(x.dtype) for part in found[:2] for name, x in part.items()}
    mutable = {paths[name]: x for part in found[2:] for name, x in part.items()}
    return unflatten_mapping(sums), metrics, unflatten_mapping(mutable)
