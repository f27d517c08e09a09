"""Gradients, metrics and scores of a batch with pipeline stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import PartitionSpec

from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.mesh import in_mesh
from stack_core.abi.metrics import Metrics, combine
from stack_core.abi.objectives import Objective
from stack_core.abi.transforms import ModelTransform
from stack_core.runtime.tree_paths import path_name
from stack_train.nn.boundary import Received, as_auxiliary, in_stage
from stack_train.nn.pipeline import Values, run_stages
from stack_train.nn.schedules import Schedule
from stack_train.objectives import compares_rows
from stack_train.step.auxiliary import INIT, AuxiliaryModel
from stack_train.step.microbatches import check_metrics, split_batch
from stack_train.step.trainable import TrainableModel
from stack_train.transform import UNCHANGED
from stack_train.variables.model_variables import Kind, Path, Tree, values_of

__all__ = ["StagedModels", "check_stages", "is_in_layers"]

Batch = Mapping[str, jax.Array]

Call = Callable[..., tuple[jax.Array, Any]]
"""(model, batch, *, key, **auxiliary models) -> (loss, arrays of the microbatch)."""


def is_in_layers(axes: tuple[str | None, ...]) -> bool:
    """Checks whether a parameter with these logical axes is stacked over layers."""
    return axes[:1] == ("layers",)


def check_stages(
    objective: Objective,
    auxiliary: Mapping[str, AuxiliaryModel],
    transform: ModelTransform,
    averaged: tuple[str, ...] = (),
) -> None:
    """Raises a ConfigError if pipeline stages cannot divide the work of an objective; see `Step`."""
    copies = [name for name, each in auxiliary.items() if each.source == INIT and transform != UNCHANGED]
    deep = [
        name
        for name, each in auxiliary.items()
        if each.optimizer is not None and any(map(is_in_layers, each.variables.axes.values()))
    ]
    problems = {
        "the objective compares the rows of a whole batch, which the microbatches of stages would separate": (
            compares_rows(objective)
        ),
        f"the objective's model {', '.join(copies)} is a copy of a model that sections transform, such as lora": copies,
        f"the objective's model {', '.join(averaged)} has the averaged weights of the trained model": averaged,
        f"the objective trains layers of the model {', '.join(deep)}, which stages do not divide": deep,
    }
    if found := [problem for problem, holds in problems.items() if holds]:
        raise ConfigError(f"mesh.stage is more than 1, but {'; and '.join(found)}. Set mesh.stage=1, or change that.")


@dataclass(frozen=True, eq=False)
class StagedModels:
    """The models of a step, whose layers pipeline stages divide.

    Attributes:
      model: the trained model.
      auxiliary: models that the objective calls in addition to the trained one, by name.
      schedule: pipeline schedule.
    """

    model: TrainableModel
    auxiliary: Mapping[str, AuxiliaryModel]
    schedule: Schedule

    def gradients(
        self, objective: Call, variables: Tree, auxiliary: Mapping[str, Tree], batch: Batch, key: jax.Array
    ) -> tuple[Tree, Metrics, Tree]:
        """Computes the gradients of microbatches averaged by the weights of their losses.

        Args:
          variables: values of all variables of the model.
          auxiliary: values of the auxiliary models by name.
          key: PRNG key, split over the microbatches.

        Returns:
          The gradients, also of trained auxiliary models by name; the combined metrics; and the mutable variables after
          the last microbatch.
        """
        stacked, found = self._run(
            objective, self.model.training_model, variables, auxiliary, batch, key, gradients=True
        )
        assert found is not None, "None only without gradients"
        metrics = {name: combine(metric) for name, metric in stacked.items()}
        total = metrics["loss"].weight
        # As in `accumulate`: a batch without targets gives 0 instead of NaN.
        total = jnp.where(total == 0, 1, total)
        gradients = {path: x / total.astype(x.dtype) for part in found[:2] for path, x in part.items()}
        mutable = {path: x for part in found[2:] for path, x in part.items()}
        return unflatten_mapping(gradients), metrics, unflatten_mapping(mutable)

    def evaluate(
        self, objective: Call, variables: Tree, auxiliary: Mapping[str, Tree], batch: Batch, key: jax.Array
    ) -> Metrics:
        """Computes the combined metrics of microbatches, with models in evaluation mode; see `gradients`."""
        build = lambda variables, key: self.model.evaluation_model(variables)
        stacked, _ = self._run(objective, build, variables, auxiliary, batch, key, gradients=False)
        return {name: combine(metric) for name, metric in stacked.items()}

    def scores(
        self, function: Callable[..., Any], variables: Tree, auxiliary: Mapping[str, Tree], batch: Batch
    ) -> Mapping[str, jax.Array]:
        """Computes `function(model, batch, **auxiliary)`, arrays [batch, ...], with models in evaluation mode."""

        def scored(model: Any, batch: Batch, *, key: jax.Array, **auxiliary: Any) -> tuple[jax.Array, Any]:
            return jnp.zeros(()), function(model, batch, **auxiliary)

        build = lambda variables, key: self.model.evaluation_model(variables)
        stacked, _ = self._run(scored, build, variables, auxiliary, batch, jax.random.key(0), gradients=False)
        # The inverse of `split_batch`.
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), stacked)

    def _run(
        self,
        call: Call,
        build: Callable[[Tree, jax.Array], Any],
        variables: Tree,
        auxiliary: Mapping[str, Tree],
        batch: Batch,
        key: jax.Array,
        *,
        gradients: bool,
    ) -> tuple[Any, tuple[Mapping[Path, jax.Array], ...] | None]:
        """Calls a function for each microbatch; see `run_stages`.

        Args:
          build: (variables, key) -> the model that `call` takes.
        """
        flat = flatten_mapping({**variables, **auxiliary})
        paths = {path_name(path): path for path in flat}

        def of_kind(kind: Kind, *, divided: bool) -> dict[str, Any]:
            return {name: flat[path] for name, path in paths.items() if self._roles[path] == (kind, divided)}

        layers, shared = (
            Values(*(of_kind(kind, divided=divided) for kind in ("trained", "mutable", "frozen")))
            for divided in (True, False)
        )

        def of_microbatch(piece: Values, shared: Values, received: Received, row: Any) -> Any:
            parts = (part for values in (piece, shared) for part in (values.trained, values.mutable, values.frozen))
            tree = unflatten_mapping({paths[name]: x for part in parts for name, x in part.items()})
            own = {name: part for name, part in tree.items() if name not in auxiliary}
            models = {
                name: as_auxiliary(self.auxiliary[name].merge(tree.get(name, {}), own), name) for name in auxiliary
            }
            key = jax.random.wrap_key_data(row[1])
            model = build(own, key)
            before = values_of(model)
            loss, arrays, sent = self._call(call, model, models, received, row[0], key)
            if gradients:
                check_metrics(arrays)
                # The sum of weighted losses is divided by the total weight, which no single microbatch has.
                weight = jax.lax.stop_gradient(jnp.asarray(arrays["loss"].weight))
                loss = loss * weight.astype(loss.dtype)
            moved = flatten_mapping(self.model.variables.mutable_values(model, before))
            after = {path_name(path): x for path, x in moved.items()}
            return sent, loss, arrays, tuple({name: after[name] for name in part.mutable} for part in (piece, shared))

        rows, specs = self._rows(batch, key), self._specs(paths, layers, shared)
        stacked, found = run_stages(
            of_microbatch, layers, shared, rows, self.schedule, gradients=gradients, specs=specs
        )
        by_path = lambda part: {paths[name]: x for name, x in part.items()}
        return stacked, None if found is None else tuple(map(by_path, found))

    def _call(
        self, call: Call, model: Any, models: Mapping[str, Any], received: Received, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any, Tree]:
        """Calls a function on a piece; returns its loss, its arrays and the message to the next piece."""

        def run(
            model: Any, received: Received, batch: Batch, of_call: jax.Array, *, key: jax.Array
        ) -> tuple[jax.Array, Any, Tree]:
            # A transform may trace this function, so the message enters and leaves it as arrays.
            (loss, arrays), sent = in_stage(received, call, model, batch, key=of_call, **models)
            return loss, arrays, sent

        # All pieces sample the same values, such as the noise of an image. A transform draws for one piece at a time:
        # with the same key, the layers of all pieces would get equal draws.
        of_piece = jax.random.fold_in(key, received.piece)
        found: tuple[jax.Array, Any, Tree] = self.model.transform.call(run, model, received, batch, key, key=of_piece)
        return found

    def _rows(self, batch: Batch, key: jax.Array) -> tuple[Any, jax.Array]:
        """Splits a batch and a key over the microbatches."""
        microbatches = self.schedule.microbatches
        for name, array in batch.items():
            if array.shape[0] % microbatches:
                raise TrainingError(
                    f"{name} has {array.shape[0]} rows, which run.pipeline.microbatches={microbatches} does not "
                    "divide. Change the size of the batch or run.pipeline.microbatches."
                )
        keys = jax.random.key_data(jax.random.split(key, microbatches))
        return jax.tree.map(lambda x: split_batch(x, microbatches), dict(batch)), keys

    def _specs(
        self, paths: Mapping[str, Path], layers: Values, shared: Values
    ) -> tuple[Mapping[str, PartitionSpec], Mapping[str, PartitionSpec]]:
        """Returns the partition specs of the gradients, by name."""
        assert in_mesh.value is not None, "stages need a mesh"
        mesh, rules = in_mesh.value
        shardings = {name: each.variables.shardings(rules, mesh) for name, each in self.auxiliary.items()}
        flat = flatten_mapping({**self.model.variables.shardings(rules, mesh), **shardings})
        # Pieces lead with [chunks, layers of a piece] in the place of [layers].
        return (
            {name: PartitionSpec(None, None, *flat[paths[name]].spec[1:]) for name in layers.trained},
            {name: flat[paths[name]].spec for name in shared.trained},
        )

    @cached_property
    def _roles(self) -> Mapping[Path, tuple[Kind, bool]]:
        """Role of each variable in a step, and True if stages divide it. Paths begin with the name of the auxiliary."""
        own = self.model.variables
        roles: dict[Path, tuple[Kind, bool]] = {
            path: (kind, path in own.staged_paths) for path, kind in own.kinds.items()
        }
        for name, each in self.auxiliary.items():
            kind: Kind = "frozen" if each.optimizer is None else "trained"
            staged = each.variables.staged_paths
            roles |= {(name, *path): (kind, path in staged) for path in each.variables.kinds}
        return roles
