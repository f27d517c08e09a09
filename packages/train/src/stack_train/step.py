"""The training step: one pure function, compiled once, whose state is donated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.mesh import DEFAULT_RULES, ShardingRules, constrain, use_mesh
from stack_core.protocols import ModelFamily, Objective
from stack_train.optim import decayed_by_axes

__all__ = ["UNCHANGED", "Batch", "LanguageModelTrainer", "ModelTransform", "TrainState", "batch_shapes"]

Batch = Mapping[str, jax.Array]
Metrics = Mapping[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "key"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """All that an update reads and writes; or its shapes, or its shardings, in the same structure.

    Attributes:
      step: int32 scalar, updates done.
      params: nested dict of the model's parameters.
      opt_state: the optimizer's state.
      key: the run's PRNG key; step n draws from `fold_in(key, n)`.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any


def batch_shapes(batch_size: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of `seq_tokens` tokens a row looks like to the step."""
    names = ("tokens", "targets", "positions", "segment_ids")
    return {name: jax.ShapeDtypeStruct((batch_size, seq_tokens), jnp.int32) for name in names}


@dataclass(frozen=True)
class ModelTransform:
    """Another model that is trained in the place of a family's, with parameters of the same paths.

    Attributes:
      apply: from the family's model, which may be abstract, to the other.
      call: `call(function, model, *args, **kwargs)` is `function(model, *args, **kwargs)` with the other model.
    """

    apply: Callable[[Any], Any]
    call: Callable[..., Any]


def _same(model: Any) -> Any:
    return model


def _called(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    return function(model, *args, **kwargs)


UNCHANGED = ModelTransform(_same, _called)
"""The family's own model."""


@dataclass(frozen=True)
class LanguageModelTrainer:
    """A `Trainer` of one model on one mesh.

    Attributes:
      model_config: config of `family`.
      optimizer: a config with `build(steps, decayed)` and `learning_rate_schedule(steps)`.
      steps: updates of the whole run, which the learning-rate schedule spans.
      accumulation_steps: parts into which a batch is cut; it divides the batch.
      transform: what is trained instead of the family's model; its parameters are floats of the same shapes.
    """

    family: ModelFamily
    model_config: Any
    objective: Objective
    optimizer: Any
    steps: int
    mesh: Mesh
    accumulation_steps: int = 1
    rules: ShardingRules = DEFAULT_RULES
    transform: ModelTransform = UNCHANGED

    def init(self, *, key: jax.Array) -> TrainState:
        """Returns the state before the first step, every leaf made where its sharding puts it."""
        return jax.jit(self._init, out_shardings=self.state_shardings)(key)

    def init_from(self, params: Any, *, key: jax.Array) -> TrainState:
        """Returns the state before the first step of a run that starts from given parameters."""
        build = jax.jit(self._init_from, out_shardings=self.state_shardings, donate_argnums=0)
        return build(params, key)

    def compile(self, batch: Mapping[str, Any]) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Compiles `step` for the shapes of `batch`; the state it is called with is donated."""
        return self.trace(batch).lower().compile()

    def trace(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """Traces `step` for the shapes of `batch`; nothing is allocated.

        Raises:
          ShardingError: the mesh does not divide a parameter, the batch, or what the step computes from them.
        """
        jitted = jax.jit(
            self.step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_shardings(batch)),
            out_shardings=(self.state_shardings, self._replicated),
        )
        return jitted.trace(self.abstract_state, _shapes(batch))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update; pure.

        Args:
          batch: arrays that lead with [batch, ...].

        Returns:
          The next state and the metrics: the objective's own, averaged by their weight over the parts of the batch,
          with `grad_norm` before clipping and `learning_rate`.
        """
        with use_mesh(self.mesh, self.rules):
            key = jax.random.fold_in(state.key, state.step)
            grads, metrics = self._gradients(state.params, batch, key)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python scalars and dtypes
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            learning_rate = self.optimizer.learning_rate_schedule(self.steps)(state.step)
            grad_norm = optax.tree.norm(grads)
        metrics = {**metrics, "grad_norm": grad_norm, "learning_rate": jnp.asarray(learning_rate, jnp.float32)}
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """The objective's metrics on one batch, without gradients; pure."""
        with use_mesh(self.mesh, self.rules):
            return self.transform.call(self.objective, self.model(params), batch, key=jax.random.key(0))[1]

    def compile_evaluation(self, batch: Mapping[str, Any]) -> Callable[[Any, Batch], Metrics]:
        """Compiles `evaluate` for the shapes of `batch`."""
        jitted = jax.jit(self.evaluate, in_shardings=(self.state_shardings.params, self.batch_shardings(batch)))
        return jitted.lower(self.abstract_state.params, _shapes(batch)).compile()

    def model(self, params: Any) -> nnx.Module:
        """The model with the given parameters."""
        return nnx.merge(self._graph[0], nnx.State(params))

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Batches are split along their leading axis over all data-parallel mesh axes."""
        return {
            name: self.rules.sharding(
                self.mesh, ("batch", *[None] * (value.ndim - 1)), value.shape, name=f"batch[{name!r}]"
            )
            for name, value in batch.items()
        }

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    @cached_property
    def state_shardings(self) -> TrainState:
        """The sharding of every leaf: parameters by their logical axes, optimizer moments like their parameters."""
        params = self._param_shardings
        abstract = jax.eval_shape(self._optimizer.init, self.abstract_params)
        opt_state = optax.tree.map_params(
            self._optimizer.init,
            lambda _, sharding: sharding,
            abstract,
            params,
            transform_non_params=lambda _: self._replicated,
        )
        return TrainState(self._replicated, params, opt_state, self._replicated)

    @cached_property
    def abstract_params(self) -> Any:
        return nnx.to_pure_dict(self._graph[1])

    @cached_property
    def logical_axes(self) -> Any:
        """The logical axis names of every parameter, in the parameters' structure."""
        variables = {
            path: variable.get_metadata()["logical_axes"] for path, variable in nnx.to_flat_state(self._graph[1])
        }
        return nnx.traversals.unflatten_mapping(variables)

    @cached_property
    def _param_shardings(self) -> Any:
        return self.rules.tree_shardings(self.mesh, self.abstract_params, self.logical_axes)

    @cached_property
    def _graph(self) -> tuple[Any, Any]:
        model = nnx.eval_shape(lambda: self.family.build(self.model_config, key=jax.random.key(0)))
        return nnx.split(self.transform.apply(model))

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer.build(self.steps, lambda params: decayed_by_axes(self.logical_axes))

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _init(self, key: jax.Array) -> TrainState:
        model_key, run_key = jax.random.split(key)
        params = nnx.to_pure_dict(nnx.state(self.family.build(self.model_config, key=model_key)))
        return self._init_from(params, run_key)

    def _init_from(self, params: Any, key: jax.Array) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(params), key)

    def _gradients(self, params: Any, batch: Batch, key: jax.Array) -> tuple[Any, Metrics]:
        if self.accumulation_steps == 1:
            return self._part_gradients(params, batch, key)
        parts = jax.tree.map(self._split, dict(batch))
        keys = jax.random.split(key, self.accumulation_steps)
        shapes = jax.eval_shape(self._part_gradients, params, _first(parts), keys[0])
        grads, metrics = jax.tree.map(jnp.zeros_like, shapes)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            result = self._part_gradients(params, *part)
            weight = result[1]["weight"]
            weighted = jax.tree.map(lambda sum_, x: sum_ + x * weight.astype(x.dtype), total[:2], result)
            return (*weighted, total[2] + weight), None

        start = self._like_params(grads), metrics, jnp.zeros(())
        (grads, metrics, weight), _ = jax.lax.scan(add, start, (parts, keys))
        mean = jax.tree.map(lambda x: x / jnp.maximum(weight, 1).astype(x.dtype), (grads, metrics))
        return mean[0], {**mean[1], "weight": weight}

    def _part_gradients(self, params: Any, batch: Batch, key: jax.Array) -> tuple[Any, Metrics]:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            return self.transform.call(self.objective, self.model(params), batch, key=key)

        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return self._like_params(grads), metrics

    def _split(self, x: jax.Array) -> jax.Array:
        """[batch, ...] -> [parts, rows, ...]; each takes rows from all over, so that rows stay on their devices."""
        parts = x.reshape(-1, self.accumulation_steps, *x.shape[1:]).swapaxes(0, 1)
        return constrain(parts, None, "batch", *[None] * (x.ndim - 1), name="a part of the batch")

    def _like_params(self, grads: Any) -> Any:
        """Splits gradients as their parameters are, so that sums and updates of them are split as well."""
        return grads if self.mesh.size == 1 else jax.lax.with_sharding_constraint(grads, self._param_shardings)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _shapes(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
