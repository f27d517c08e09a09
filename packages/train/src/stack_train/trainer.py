"""The training step: a pure function that is compiled once and donates its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import MeshAxes, ShardingRules, use_mesh
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import ModelFamily
from stack_core.abi.training import ModelTransform, Objective, ScoresTokens
from stack_core.abi.tree_paths import path_name
from stack_train.batches import batch_shapes, check_batch
from stack_train.companions import INIT, Companion
from stack_train.further import FurtherModel, FurtherState, further_models
from stack_train.microbatches import accumulate, check_metrics
from stack_train.nn.schedules import Schedule
from stack_train.objectives import check_inputs
from stack_train.optim.optax_optimizer import Optimizer, as_optimizer
from stack_train.optim.placement import like_parameters
from stack_train.precision import Precision, apply_updates, is_low_precision, widen, widen_optimizer, zero_sums
from stack_train.scoring import scores
from stack_train.staged import staged
from stack_train.state import TrainState
from stack_train.transform import UNCHANGED
from stack_train.variables import (
    Kind,
    ModelVariables,
    Path,
    Tree,
    cast_values,
    cast_variables,
    join,
    sharding_rules,
    values_of,
    variable_shardings,
)

__all__ = ["Batch", "Trainer"]

Batch = Mapping[str, jax.Array]

_NO_PARAM = nnx.Not(nnx.Param)
# Random streams folded into keys, distinct from the streams that an objective folds into its key.
_MODEL_STREAM, _FURTHER_STREAM, _ROUNDING_STREAM = 0x6D6F64, 0x667274, 0x726E64


@dataclass(frozen=True)
class Trainer:
    """A `Trainer` of one model on one mesh.

    Attributes:
      family: model family.
      model_config: config of the model.
      objective: training objective.
      optimizer: a config of `stack_train.optim`, or an Optax transformation such as `optax.adamw(1e-3)`.
      steps: total number of updates, which the learning-rate schedule spans.
      mesh: device mesh.
      accumulation_steps: number of microbatches per batch; it divides the batch size.
      rules: mesh axes by logical axis. They override the family's rules, which override the default rules.
      transform: transform of the family's model; the transformed model is trained.
      companions: frozen models that the objective uses, by name.
      trained: nnx filter of the variables that the optimizer updates. Variables with the metadata `trained=False`,
        that the transform excludes, or that `optimizer.groups` freezes, are not trained.
      moved: nnx filter of other variables that the forward pass may update, in addition to variables with
        `trained=False`. All remaining variables are frozen.
      schedule: pipeline schedule; None without pipeline stages.
      precision: dtype of trained parameters. Frozen parameters have the `param_dtype` of `model_config`.
    """

    family: ModelFamily
    model_config: Any
    objective: Objective
    optimizer: Any
    steps: int
    mesh: Mesh
    accumulation_steps: int = 1
    rules: Mapping[str, MeshAxes] = field(default_factory=dict)
    transform: ModelTransform = UNCHANGED
    companions: Mapping[str, Companion] = field(default_factory=dict)
    trained: Any = nnx.Param
    moved: Any = _NO_PARAM
    schedule: Schedule | None = None
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        as_optimizer(self.optimizer)  # raises if it is not an optimizer

    def init(self, *, key: jax.Array, companions: Mapping[str, Tree] | None = None) -> TrainState:
        """Initializes the state before the first step, with each leaf created on its sharding.

        Args:
          key: PRNG key of the initialization and of the run.
          companions: variables of the companions from other runs, by name.
        """
        return self.init_from({}, key=key, companions=companions)

    def init_from(self, variables: Tree, *, key: jax.Array, companions: Mapping[str, Tree] | None = None) -> TrainState:
        """Initializes the state of a run that starts from existing variables, which are donated.

        Args:
          variables: variables of the family's model by path, floats of any dtype. Missing variables are initialized.
          key: as for `init`.
          companions: as for `init`.
        """
        given = dict(companions or {})
        shardings = replace(self.state_shardings, companions=self._companion_shardings(INIT))
        state = jax.jit(self._init, out_shardings=shardings, donate_argnums=0)(variables, key)
        return replace(state, companions={**state.companions, **given})

    def init_frozen(self, variables: Tree, *, key: jax.Array) -> tuple[Tree, Mapping[str, Tree]]:
        """Initializes the frozen variables and companions, the part of `init_from` that checkpoints do not store."""
        shardings = (self.state_shardings.frozen, self._companion_shardings(INIT))

        def frozen(given: Tree, key: jax.Array) -> tuple[Tree, Mapping[str, Tree]]:
            state = self._init(given, key)
            return state.frozen, state.companions

        return jax.jit(frozen, out_shardings=shardings)(variables, key)

    def compile(self, batch: Mapping[str, Any]) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Compiles `step` for the shapes of `batch`; the compiled step donates its state."""
        return self.runnable(self.trace(batch).lower().compile(), batch)

    def runnable(
        self, compiled: jax.stages.Compiled, batch: Mapping[str, Any]
    ) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Wraps the compiled step with a check that names the arrays of a batch with other shapes or dtypes.

        On CPUs, compiled programs reject committed 4-bit arrays, because JAX reports their layouts in two ways (jax
        0.10.2). A state with such arrays goes through `jax.jit`, which compiles again or hits the compilation cache.
        """
        program: Any = self._jitted(batch) if self._has_narrow_codes else compiled
        expected = batch_shapes(batch)

        def step(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
            check_batch(batch, expected, "compile")
            stepped: tuple[TrainState, Metrics] = program(state, batch)
            return stepped

        return step

    def trace(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """Traces `step` for the shapes of `batch`; nothing is allocated.

        Raises:
          ShardingError: the mesh does not divide a variable, the batch, or an intermediate array.
          ConfigError: the batch lacks an array that the objective reads.
          TrainingError: the forward pass assigns a trained or frozen variable.
        """
        check_inputs(self.objective, batch_shapes(batch))
        return self._jitted(batch).trace(self.abstract_state, batch_shapes(batch))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Computes one update (pure). The result equals `gradients` followed by `update`, bit for bit.

        Args:
          state: current state.
          batch: arrays of shape [batch, ...].

        Returns:
          The next state and the metrics of `gradients` and `update`.
        """
        gradients, metrics, moved = self.gradients(state, batch)
        # Keeps XLA from fusing the two halves, which would round some updates differently than a separate `update`.
        gradients, moved = jax.lax.optimization_barrier((gradients, moved))
        state, reported = self.update(state, gradients, moved)
        return state, {**metrics, **reported}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Tree, Metrics, Tree]:
        """Computes the gradients of one batch (pure).

        Returns:
          The gradients in the structure of `state.trained`, the objective's metrics combined over the microbatches,
          and the variables updated by the forward pass.
        """
        with use_mesh(self.mesh, self.sharding_rules):
            return self._gradients(state, batch, jax.random.fold_in(state.key, state.step))

    def update(self, state: TrainState, gradients: Tree, moved: Tree) -> tuple[TrainState, Metrics]:
        """Applies gradients and updated variables to the state (pure).

        Returns:
          The next state and metrics: `grad_norm` before clipping, `NAME_grad_norm` of each auxiliary model, and the
          optimizer's metrics.
        """
        own = {name: gradients[name] for name in state.params}
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), _ROUNDING_STREAM)
        # optax mixes Python scalars and dtypes; profiles show the scope as a layer.
        with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
            updates, opt_state = self._optimizer.update(own, state.opt_state, state.params)
            params = apply_updates(state.params, updates, key=jax.random.fold_in(key, 0))
            reported = self._settings.metrics(opt_state, state.step, self.steps)
            reported["grad_norm"] = Metric.mean(optax.tree.norm(widen(own)))
            further = dict(state.further)
            for place, (name, each) in enumerate(self._further.items()):
                key_of_model = jax.random.fold_in(key, place + 1)
                further[name], norm = each.update(state.further[name], gradients[name], key=key_of_model)
                reported |= norm
        changes = {"params": params, "moved": moved, "opt_state": opt_state, "further": further}
        return replace(state, step=state.step + 1, **changes), reported

    def evaluate(self, variables: Tree, batch: Batch, beside: Mapping[str, Tree] | None = None) -> Metrics:
        """Computes the objective's metrics on one batch, without gradients (pure).

        Args:
          variables: all variables of the model, as returned by `evaluation_variables`.
          batch: arrays of shape [batch, ...].
          beside: variables of companions and auxiliary models, as returned by `evaluation_beside`.
        """
        with use_mesh(self.mesh, self.sharding_rules):
            if self.schedule is not None:
                return self._staged(variables, batch, jax.random.key(0), evaluated=True)[1]
            objective = self._objective(variables, beside or {})
            return self.transform.call(objective, self._evaluated(variables), batch, key=jax.random.key(0))[1]

    def score(
        self, variables: Tree, batch: Batch, further: Mapping[str, Tree] | None = None, *, entropy: bool = False
    ) -> Mapping[str, jax.Array]:
        """Scores the targets of a batch with a language model, without gradients (pure).

        Args:
          variables: all variables of the model.
          batch: tokens, targets, positions and segment_ids, int32[batch, seq]; target -100 is ignored.
          further: parameters of the auxiliary models; without them the objective's own scores are omitted.
          entropy: also return the entropy at each position, which needs all logits, computed in chunks.

        Returns:
          float32[batch, seq] arrays: "logprobs", log p(target) or 0 if the target is ignored; "entropy" if requested;
          "values" if the model outputs values; and the objective's scores if it implements `ScoresTokens`.
        """
        with use_mesh(self.mesh, self.sharding_rules):
            more = None
            if isinstance(self.objective, ScoresTokens) and (further or not self._further):
                models = {name: self._beside(name, tree, variables) for name, tree in (further or {}).items()}
                more = partial(self.objective.scores, **models)
            scored = partial(scores, entropy=entropy, more=more)
            return self.transform.call(scored, self._evaluated(variables), batch)

    def compiled_scores(self) -> Callable[..., Mapping[str, jax.Array]]:
        """Returns `score` under `jax.jit`, compiled once per batch shape; its outputs are replicated."""
        return jax.jit(self.score, out_shardings=self._replicated)

    def compile_evaluation(self, batch: Mapping[str, Any]) -> Callable[..., Metrics]:
        """Compiles `evaluate` for the shapes of `batch`."""
        shardings = (self.variable_shardings, self.batch_shardings(batch), self.state_shardings.beside)
        jitted = jax.jit(self.evaluate, in_shardings=shardings)
        lowered = jitted.lower(self.abstract_variables, batch_shapes(batch), self.abstract_state.beside)
        compiled: Any = jitted if self._has_narrow_codes else lowered.compile()  # see `runnable`

        expected = batch_shapes(batch)

        def evaluate(variables: Tree, batch: Mapping[str, Any], beside: Any = None) -> Metrics:
            check_batch(batch, expected, "compile_evaluation")
            metrics: Metrics = compiled(variables, batch, beside or {})
            return metrics

        return evaluate

    def variables(self, state: TrainState) -> Tree:
        """Returns all variables of the model of a state, as nested dicts."""
        return join(state.params, state.moved, state.frozen)

    def evaluation_variables(self, state: TrainState) -> Tree:
        """Returns `variables` with parameters replaced by the optimizer's averages, if it has any."""
        with jax.numpy_dtype_promotion("standard"):
            params = self._settings.evaluation_params(state.params, state.opt_state)
        return self.variables(replace(state, params=params))

    def evaluation_beside(self, state: TrainState) -> Mapping[str, Tree]:
        """Returns the variables of companions and auxiliary models by name, with averages as `evaluation_variables`."""
        with jax.numpy_dtype_promotion("standard"):
            further = {name: each.evaluated(state.further[name]) for name, each in self._further.items()}
        return {**state.companions, **further}

    def model(self, variables: Tree, *, key: jax.Array | None = None) -> Any:
        """Builds the model from its variables; its random streams start from `key`."""
        return self._model.merge(variables, key=key)

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Returns the shardings of a batch: the leading axis over all data-parallel mesh axes."""
        return {
            name: self.sharding_rules.sharding(
                self.mesh, ("batch", *[None] * (value.ndim - 1)), value.shape, name=f"batch[{name!r}]"
            )
            for name, value in batch.items()
        }

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        params, moved, frozen = self._model.split(self._model.abstract)
        opt_state = jax.eval_shape(self._optimizer.init, params)
        scalar, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        companions = {
            name: join(params, moved) if companion.source == INIT else companion.model.abstract
            for name, companion in self.companions.items()
        }
        further = {name: each.abstract for name, each in self._further.items()}
        shapes = TrainState(scalar, params, moved, frozen, companions, opt_state, key, further)
        return jax.tree.map(_placed, shapes, self.state_shardings)

    @cached_property
    def state_shardings(self) -> TrainState:
        """The sharding of every leaf: variables by their logical axes, the optimizer's state like its parameters."""
        params, moved, frozen = self._model.split(self.variable_shardings)
        shapes = self.abstract_params
        abstract = jax.eval_shape(self._optimizer.init, shapes)
        opt_state = like_parameters(abstract, shapes, params, self._replicated)
        companions = self._companion_shardings(*(companion.source for companion in self.companions.values()))
        further = {
            name: each.shardings(self._shardings_of(each.model), self._replicated)
            for name, each in self._further.items()
        }
        return TrainState(self._replicated, params, moved, frozen, companions, opt_state, self._replicated, further)

    @cached_property
    def abstract_variables(self) -> Tree:
        """Shapes, dtypes and shardings of all variables; nothing is allocated."""
        return jax.tree.map(_placed, self._model.abstract, self.variable_shardings)

    @property
    def abstract_params(self) -> Tree:
        """Shapes and dtypes of the variables that are trained."""
        return self._model.select(self._model.shapes, "trained")

    @property
    def parameter_count(self) -> int:
        """Entries of all parameters, frozen ones included."""
        _, _, frozen = self._model.split(self._model.abstract)
        return sum(leaf.size for leaf in jax.tree.leaves((self.abstract_params, frozen)))

    @cached_property
    def variable_shardings(self) -> Tree:
        """Where every variable lies, as nested dicts."""
        return self._shardings_of(self._model)

    @property
    def companions_from_runs(self) -> tuple[str, ...]:
        """The names of the companions that are the models of other runs."""
        return tuple(name for name, companion in self.companions.items() if companion.source != INIT)

    @cached_property
    def start_variables(self) -> Tree:
        """Shapes, dtypes and shardings of the variables that `init_from` accepts, as nested dicts."""
        model = ModelVariables.of(self._built)
        return jax.tree.map(_placed, model.abstract, self._shardings_of(model))

    @property
    def abstract_model(self) -> Any:
        """The transformed model without values, with variables in their training dtypes."""
        return self.transform.apply(self._built)

    @cached_property
    def logical_axes(self) -> Tree:
        """The logical axis names of every variable, as nested dicts."""
        return self._model.select(self._model.axes, "trained", "moved", "frozen")

    def _jitted(self, batch: Mapping[str, Any]) -> Any:
        return jax.jit(
            self.step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_shardings(batch)),
            out_shardings=(self.state_shardings, self._replicated),
        )

    @property
    def _has_narrow_codes(self) -> bool:
        """Whether the state has arrays of less than a byte an entry, on CPUs."""
        dtypes = (leaf.dtype for leaf in jax.tree.leaves((self._model.shapes, self.abstract_state.companions)))
        integers = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.integer))
        return self.mesh.devices.flat[0].platform == "cpu" and any(jnp.iinfo(dtype).bits < 8 for dtype in integers)

    @cached_property
    def _built(self) -> nnx.Module:
        """The family's model without values, its variables in the dtypes of training."""
        return nnx.eval_shape(lambda: cast_variables(self._build(jax.random.key(0)), self._dtypes))

    def _build(self, key: jax.Array) -> nnx.Module:
        # Parameters are sampled in their training dtype: bfloat16 samples have fewer distinct values.
        return self.family.build(self.precision.training_config(self.model_config), key=key)

    @cached_property
    def _dtypes(self) -> Mapping[Path, Any]:
        """The dtypes of the family's variables in training: trained ones by `precision`, others as in inference."""
        model = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        own = nnx.eval_shape(lambda: self.family.build(self.model_config, key=jax.random.key(0)))
        made, published = values_of(model), {path: value.dtype for path, value in values_of(own).items()}
        if all(value.dtype == published[path] and not is_low_precision(value.dtype) for path, value in made.items()):
            return published
        variables = nnx.to_flat_state(nnx.state(self.transform.apply(model)))
        trained = {path for path, variable in variables if self._kind_of(path, variable) == "trained"}
        if self.precision.params != "float32" and not trained & made.keys():
            raise ConfigError(
                f"precision.params is {self.precision.params!r}, but no parameter of the model itself is trained. "
                "Leave it out: the section that adds adapters has their dtype, and frozen parameters have "
                "model.param_dtype."
            )
        return {
            path: self.precision.trained_dtype(value.dtype) if path in trained else published[path]
            for path, value in made.items()
        }

    @cached_property
    def _model(self) -> ModelVariables:
        model = self.abstract_model
        flat = nnx.to_flat_state(nnx.state(model))
        paths = [path_name(path) for path, variable in flat if self._could_train(path, variable)]
        self._settings.check([*paths, *(path for each in self._further.values() for path in each.paths)])
        return ModelVariables.of(model, self._kind_of)

    def _could_train(self, path: Path, variable: Any) -> bool:
        """Returns whether a variable is trained unless `optimizer.groups` freezes it."""
        may = variable.get_metadata().get("trained", True) and nnx.filterlib.to_predicate(self.trained)(path, variable)
        return may and self.transform.trained(path, variable)

    def _kind_of(self, path: Path, variable: Any) -> Kind:
        if self._could_train(path, variable):
            return "frozen" if self._settings.freezes(path_name(path)) else "trained"
        is_marked = not variable.get_metadata().get("trained", True)
        return "moved" if is_marked or nnx.filterlib.to_predicate(self.moved)(path, variable) else "frozen"

    @property
    def _settings(self) -> Optimizer:
        return as_optimizer(self.optimizer)

    @cached_property
    def _further(self) -> Mapping[str, FurtherModel]:
        """The models of the objective's own that are trained, by their names."""
        modules = {str(path[0]) for path, _ in nnx.to_flat_state(nnx.state(self.abstract_model))}
        settings = (self.objective, self.model_config, self._settings, self.steps, self.precision)
        return further_models(*settings, taken={*self.companions, *modules})

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return widen_optimizer(self._settings.build(self.steps, self._model.select(self._model.axes, "trained")))

    @cached_property
    def sharding_rules(self) -> ShardingRules:
        """All rules by which arrays are split over the mesh."""
        return sharding_rules(self.family, self.rules)

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _companion_shardings(self, *sources: str) -> dict[str, Tree]:
        """Where the variables of companions lie, of those that come from some sources."""
        params, moved, _ = self._model.split(self.variable_shardings)
        return {
            name: join(params, moved) if companion.source == INIT else self._shardings_of(companion.model)
            for name, companion in self.companions.items()
            if companion.source in sources
        }

    def _shardings_of(self, model: ModelVariables) -> Tree:
        shapes = flatten_mapping(model.abstract)
        axes = {path: model.axes[path] for path in shapes}
        return unflatten_mapping(variable_shardings(shapes, axes, self.sharding_rules, self.mesh))

    def _init(self, given: Tree, key: jax.Array) -> TrainState:
        model_key, run_key = jax.random.split(key)
        built = self._build(model_key)
        variables = join(unflatten_mapping(values_of(built)), given)
        values = flatten_mapping(cast_values(variables, self._dtypes))
        if self.transform != UNCHANGED:
            model = nnx.merge(nnx.split(built)[0], nnx.State(unflatten_mapping(values)))
            values = values_of(self.transform.apply(model))
        params, moved, frozen = self._model.split(unflatten_mapping(values))
        started = {name for name, companion in self.companions.items() if companion.source == INIT}
        # Copied, as the trained parameters are donated to the first step.
        companions = {name: jax.tree.map(jnp.copy, join(params, moved)) for name in started}
        opt_state = self._optimizer.init(params)
        further_key = jax.random.fold_in(model_key, _FURTHER_STREAM)
        further: dict[str, FurtherState] = {
            name: each.init(key=jax.random.fold_in(further_key, place))
            for place, (name, each) in enumerate(self._further.items())
        }
        return TrainState(jnp.zeros((), jnp.int32), params, moved, frozen, companions, opt_state, run_key, further)

    def _gradients(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Tree, Metrics, Tree]:
        if self.schedule is not None:
            grads, metrics = self._staged(state.params, batch, key, evaluated=False)
            assert grads is not None, "none only where it evaluates"
            return self._like_params(grads), metrics, state.moved
        gradients = partial(self._part_gradients, state)
        if self.accumulation_steps == 1:
            return gradients(state.moved, batch, key)
        zeros = self._like_params(zero_sums(state.trained))
        return accumulate(gradients, zeros, state.moved, batch, jax.random.split(key, self.accumulation_steps))

    def _staged(self, params: Tree, batch: Batch, key: jax.Array, *, evaluated: bool) -> tuple[Tree | None, Metrics]:
        """The gradients, unless it only evaluates, and metrics of a batch that goes through stages."""

        def objective(params: Tree, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
            if evaluated:
                return self.objective(self._evaluated(params), batch, key=key)
            model = self.model(params, key=jax.random.fold_in(key, _MODEL_STREAM))
            model.train()
            return self.objective(model, batch, key=key)

        assert self.schedule is not None, "stages without a schedule"
        return staged(
            objective,
            params,
            self._model.axes,
            self.state_shardings.params,
            batch,
            key,
            self.schedule,
            gradients=not evaluated,
        )

    def _part_gradients(
        self, state: TrainState, moved: Tree, batch: Batch, key: jax.Array
    ) -> tuple[Tree, Metrics, Tree]:
        def loss(trained: Tree) -> tuple[jax.Array, tuple[Metrics, Tree]]:
            variables = join({name: trained[name] for name in state.params}, moved, state.frozen)
            further = {name: trained[name] for name in self._further}
            model = self.model(variables, key=jax.random.fold_in(key, _MODEL_STREAM))
            model.train()
            before = values_of(model)
            objective = self._objective(variables, {**state.companions, **further})
            value, metrics = self.transform.call(objective, model, batch, key=key)
            check_metrics(metrics)
            return value, (metrics, self._model.moved_values(model, before))

        (_, (metrics, moved)), grads = jax.value_and_grad(loss, has_aux=True)(state.trained)
        return self._like_params(grads), metrics, moved

    def _objective(self, variables: Tree, beside: Mapping[str, Tree]) -> Objective:
        """The objective, with the companions and further models that it needs handed to it."""
        models = {name: self._beside(name, tree, variables) for name, tree in beside.items()}
        return partial(self.objective, **models) if models else self.objective

    def _beside(self, name: str, tree: Tree, variables: Tree) -> Any:
        """A companion or a further model."""
        if name in self._further:
            return self._further[name].model.merge(tree)
        companion = self.companions[name]
        # A companion that copies the initial model shares the frozen variables of the trained model.
        model = self.model(join(variables, tree)) if companion.source == INIT else companion.model.merge(tree)
        model.eval()
        return model

    def _evaluated(self, variables: Tree) -> Any:
        """Builds the model in evaluation mode: no dropout, batch norms use running statistics."""
        model = self.model(variables)
        model.eval()
        return model

    def _like_params(self, grads: Tree) -> Tree:
        """Constrains gradients to the shardings of their parameters, which shards their sums and updates as well."""
        return grads if self.mesh.size == 1 else jax.lax.with_sharding_constraint(grads, self.state_shardings.trained)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
