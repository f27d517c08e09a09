"""The training step: gradients and an update, as pure functions of the state and a batch."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import in_mesh
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.objectives import Objective
from stack_core.abi.plugins import registries
from stack_core.abi.transforms import ModelTransform
from stack_train.diffusion.denoiser import Denoiser
from stack_train.nn.schedules import Schedule
from stack_train.objectives import as_objective, check_accumulation, compares_rows
from stack_train.optim.optax_optimizer import Optimizer, as_optimizer
from stack_train.optim.outer import OuterConfig
from stack_train.step.auxiliary import AVERAGE, INIT, AuxiliaryModel, auxiliary_models
from stack_train.step.microbatches import accumulate, check_metrics
from stack_train.step.precision import Precision, apply_updates, widen, widen_optimizer, zero_sums
from stack_train.step.qk_clip import QKClip, qk_clip_of
from stack_train.step.replicas import check_replicas, replicate, separate_replicas, train_apart
from stack_train.step.scoring import predictions, scores
from stack_train.step.staged import StagedModels, check_stages
from stack_train.step.state import TrainState
from stack_train.step.trainable import NO_PARAM, FunctionFamily, TrainableModel
from stack_train.transform import UNCHANGED
from stack_train.variables.model_variables import Tree, join, values_of

__all__ = ["Batch", "Step", "make_step"]

Batch = Mapping[str, jax.Array]

_LOGITS = "largest logits"  # not a name of a module, which is an identifier

# Random streams folded into keys, distinct from the streams that an objective folds into its key.
_AUXILIARY_STREAM, _ROUNDING_STREAM = 0x667274, 0x726E64


def make_step(  # noqa: PLR0913  each is an option of the step
    model: Any,
    objective: Objective | Callable[..., Any],
    optimizer: Any,
    *,
    steps: int = 1,
    precision: Precision | None = None,
    accumulation_steps: int = 1,
    transform: ModelTransform = UNCHANGED,
    schedule: Schedule | None = None,
    trained: Any = nnx.Param,
    mutable: Any = NO_PARAM,
    open_model: Callable[[str], nnx.Module] | None = None,
) -> "Step":
    """Composes a model, an objective and an optimizer into a training step.

    Args:
      model: a function `build(key)` that returns an `nnx.Module`; the config of a model of a registered family; or a
        pair of a `ModelFamily` and a config.
      objective: an `Objective`, or a function `loss(model, batch, *, key)` that returns a scalar, or a scalar and
        metrics (see `as_objective`).
      optimizer: an Optax transformation such as `optax.adamw(1e-3)`, or a config of `stack_train.optim`.
      steps: total number of updates, which the schedule of a `stack_train.optim` config spans.
      precision: dtype of trained parameters; float32 by default.
      accumulation_steps: number of microbatches per batch; it divides the batch size.
      transform: transform of the model; the transformed model is trained.
      schedule: pipeline schedule; None without pipeline stages.
      trained: nnx filter of the variables that the optimizer updates, see `TrainableModel`.
      mutable: nnx filter of the variables that the forward pass may update, see `TrainableModel`.
      open_model: returns the model of a source "run:DIRECTORY" without values, for frozen models that the objective
        declares.

    Raises:
      ConfigError: an argument is not usable, a pattern of `optimizer.groups` matches no parameter, an auxiliary model
        has the name of a module of the model, or replicas of `optimizer.outer` are combined with an option that they do
        not support.
      TrainingError: a variable that would be trained is not an array of floats.
    """
    settings, outer = separate_replicas(as_optimizer(optimizer))
    objective = as_objective(objective)
    check_accumulation(objective, accumulation_steps)
    precision = Precision() if precision is None else precision
    family, config = _family_and_config(model)
    trainable = TrainableModel(family, config, settings, precision, transform, trained, mutable)
    declared = objective.auxiliary_models
    averaged = tuple(name for name, source in declared.items() if source == AVERAGE)
    auxiliary = auxiliary_models(
        {name: source for name, source in declared.items() if name not in averaged},
        lambda: trainable.variables,
        open_model or _no_runs,
        config,
        settings,
        steps,
        precision,
    )
    if same := sorted({*declared} & trainable.module_names):
        raise ConfigError(
            f"The objective has an auxiliary model {same[0]!r}, which is the name of a module of the run's model. "
            "Rename the auxiliary model."
        )
    if schedule is not None:
        check_stages(objective, auxiliary, transform, averaged)
    trained_auxiliary = (each for each in auxiliary.values() if each.optimizer is not None)
    # Patterns may match parameters of auxiliary models, so all paths are checked together.
    settings.check([*trainable.trainable_paths, *(path for each in trained_auxiliary for path in each.paths)])
    qk_clip = qk_clip_of(
        settings,
        trainable,
        {
            "a section transforms the model, such as lora": transform != UNCHANGED,
            "mesh.stage is more than 1": schedule is not None,
            "optimizer.outer has several replicas": outer is not None,
            "the objective trains auxiliary models": any(each.optimizer is not None for each in auxiliary.values()),
        },
    )
    step = Step(
        trainable, objective, settings, steps, auxiliary, averaged, accumulation_steps, schedule, outer, qk_clip
    )
    if outer is not None:
        check_replicas(
            outer,
            steps,
            {
                "sections transform the model, such as lora": transform != UNCHANGED,
                "mesh.stage is more than 1": schedule is not None,
                "the objective calls auxiliary models": bool(declared),
                "the objective compares the rows of a whole batch": compares_rows(objective),
                "precision.params is not float32": precision.params != "float32",
                "the forward pass updates variables, such as the bias of a router or batch-norm statistics": bool(
                    jax.tree.leaves(step.abstract_state.mutable)
                ),
            },
        )
    return step


@dataclass(frozen=True, eq=False)
class Step:
    """A training step, constructed by `make_step`. Its methods are pure; inside `use_mesh`, they shard their arrays.

    Attributes:
      model: the trained model.
      objective: training objective.
      optimizer: optimizer of the model and of trained auxiliary models.
      steps: total number of updates.
      auxiliary: models that the objective calls in addition to the trained one, by name.
      averaged: further names by which the objective calls the trained model with its averaged weights.
      accumulation_steps: number of microbatches per batch.
      schedule: pipeline schedule; None without pipeline stages.
      outer: settings of replicas that train apart; None without replicas. Outer steps of one replica are a part of the
        optimizer.
      qk_clip: bound of the attention logits; None bounds none.
    """

    model: TrainableModel
    objective: Objective
    optimizer: Optimizer
    steps: int
    auxiliary: Mapping[str, AuxiliaryModel]
    averaged: tuple[str, ...] = ()
    accumulation_steps: int = 1
    schedule: Schedule | None = None
    outer: OuterConfig | None = None
    qk_clip: QKClip | None = None

    def init(self, variables: Tree, *, key: jax.Array) -> TrainState:
        """Initializes the state before the first step, without the auxiliary models of other runs.

        Args:
          variables: variables of the untransformed model by path, floats of any dtype. Missing ones are initialized.
          key: PRNG key of the initialization and of the run.
        """
        # Separate keys: another initialization leaves the random streams of the steps unchanged.
        model_key, run_key = jax.random.split(key)
        values = self.model.init(variables, key=model_key)
        params, mutable, frozen = self.model.variables.split(values)
        # One key per trained auxiliary model, in order, so adding a model leaves the keys of earlier ones unchanged.
        keys = (jax.random.fold_in(jax.random.fold_in(model_key, _AUXILIARY_STREAM), n) for n in itertools.count())
        auxiliary = {
            name: each.init(values, key=None if each.optimizer is None else next(keys))
            for name, each in self.auxiliary.items()
            if each.source in ("", INIT)
        }
        opt_state = self._init_opt_state(params)
        return TrainState(jnp.zeros((), jnp.int32), params, mutable, frozen, opt_state, run_key, auxiliary)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        params, mutable, frozen = self.model.variables.split(self.model.variables.abstract)
        opt_state, step = jax.eval_shape(self._init_opt_state, params), jax.ShapeDtypeStruct((), jnp.int32)
        auxiliary = {name: each.abstract for name, each in self.auxiliary.items()}
        key = jax.eval_shape(lambda: jax.random.key(0))
        return TrainState(step, params, mutable, frozen, opt_state, key, auxiliary)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Computes one update. The result equals `gradients` followed by `update`, bit for bit.

        Args:
          state: current state.
          batch: arrays of shape [batch, ...].

        Returns:
          The next state and the metrics of `gradients` and `update`.
        """
        if self.outer is None:
            return self._update_once(state, batch)
        return train_apart(self._update_once, state, batch, self.outer, self.model.variables)

    def _update_once(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        gradients, metrics, mutable = self.gradients(state, batch)
        # Keeps XLA from fusing the two halves, which would round some updates differently than a separate `update`.
        gradients, mutable = jax.lax.optimization_barrier((gradients, mutable))
        state, reported = self.update(state, gradients, mutable)
        return state, {**metrics, **reported}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Tree, Metrics, Tree]:
        """Computes the gradients of one batch.

        Returns:
          The gradients in the structure of `state.trained`, the objective's metrics combined over the microbatches,
          and the variables updated by the forward pass. With QK-clip they include the largest logits, for `update`.
        """
        # From the step count, not split from a stored key: a resumed run samples as if it had not stopped.
        key = jax.random.fold_in(state.key, state.step)
        if self.schedule is not None:
            auxiliary = {name: each.params for name, each in state.auxiliary.items()}
            found = self._staged.gradients(self.objective, self.variables(state), auxiliary, batch, key)
            return self._sharded(found[0]), *found[1:]
        of_microbatch = partial(self._microbatch_gradients, state)
        # The logits pass through the microbatches like other values of the forward pass.
        mutable = state.mutable if self.qk_clip is None else {**state.mutable, _LOGITS: self.qk_clip.empty()}
        # Without a scan, which would keep a second buffer of gradients.
        if self.accumulation_steps == 1:
            return of_microbatch(mutable, batch, key)
        zeros = self._sharded(zero_sums(state.trained))
        return accumulate(of_microbatch, zeros, mutable, batch, jax.random.split(key, self.accumulation_steps))

    def update(self, state: TrainState, gradients: Tree, mutable: Tree) -> tuple[TrainState, Metrics]:
        """Applies gradients and updated variables to the state.

        Returns:
          The next state and metrics: `grad_norm` before clipping, `NAME_grad_norm` of each auxiliary model, and the
          optimizer's metrics.
        """
        own = {name: gradients[name] for name in state.params}
        logits, mutable = _without_logits(mutable)
        of_logits = {} if self.qk_clip is None else {"weight_factors": self.qk_clip.factors(logits)}
        # Its own stream: rounding must not correlate with dropout or with the objective's samples.
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), _ROUNDING_STREAM)
        # optax mixes Python scalars and dtypes; profiles show the scope as a layer.
        with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
            updates, opt_state = self.transformation.update(own, state.opt_state, state.params, **of_logits)
            params = apply_updates(state.params, updates, key=jax.random.fold_in(key, 0))
            reported = self.optimizer.metrics(opt_state, state.step, self.steps)
            reported["grad_norm"] = Metric.mean(optax.tree.norm(widen(own)))
            reported |= {} if self.qk_clip is None else self.qk_clip.metrics(logits)
            auxiliary = dict(state.auxiliary)
            trained = (name for name, each in self.auxiliary.items() if each.optimizer is not None)
            for place, name in enumerate(trained, 1):
                of_model = jax.random.fold_in(key, place)
                auxiliary[name], norm = self.auxiliary[name].update(auxiliary[name], gradients[name], key=of_model)
                reported |= norm
        changes = {"params": params, "mutable": mutable, "opt_state": opt_state, "auxiliary": auxiliary}
        return replace(state, step=state.step + 1, **changes), reported

    def evaluate(self, variables: Tree, batch: Batch, auxiliary: Mapping[str, Tree] | None = None) -> Metrics:
        """Computes the objective's metrics on one batch, without gradients.

        Args:
          variables: all variables of the model, as returned by `evaluation_variables`.
          batch: arrays of shape [batch, ...].
          auxiliary: variables of the auxiliary models, as returned by `evaluation_auxiliary`.
        """
        if self.schedule is not None:
            # The same key for every evaluation keeps the results comparable.
            return self._staged.evaluate(self.objective, variables, auxiliary or {}, batch, jax.random.key(0))
        objective = self._objective(variables, auxiliary or {}, averages=variables)
        model = self.model.evaluation_model(variables)
        return self.model.transform.call(objective, model, batch, key=jax.random.key(0))[1]

    def score(
        self, variables: Tree, batch: Batch, auxiliary: Mapping[str, Tree] | None = None, *, entropy: bool = False
    ) -> Mapping[str, jax.Array]:
        """Scores the targets of a batch with a language model, or predicts with a denoiser, without gradients.

        Args:
          variables: all variables of the model.
          batch: tokens, targets, positions and segment_ids, int32[batch, seq]; target -100 is ignored. For a denoiser,
            images, timesteps and the condition.
          auxiliary: parameters of the auxiliary models; without them the objective's own scores are omitted.
          entropy: also return the entropy at each position, which needs all logits, computed in chunks.

        Returns:
          float32[batch, seq] arrays: "logprobs", log p(target) or 0 if the target is ignored; "entropy" if requested;
          "values" if the model outputs values; and the arrays of `Objective.scores`. For a denoiser "predictions".
        """

        def scored(model: Any, batch: Batch, **models: Any) -> Mapping[str, jax.Array]:
            if isinstance(model, Denoiser):
                return predictions(model, batch)
            more = partial(self.objective.scores, **models) if models or not self.auxiliary else None
            return scores(model, batch, entropy=entropy, more=more)

        if self.schedule is not None:
            return self._staged.scores(scored, variables, auxiliary or {}, batch)
        models = {name: self.auxiliary[name].merge(tree, variables) for name, tree in (auxiliary or {}).items()}
        model = self.model.evaluation_model(variables)
        return self.model.transform.call(partial(scored, **models), model, batch)

    def variables(self, state: TrainState) -> Tree:
        """Returns all variables of the model of a state, as nested dicts."""
        return join(state.params, state.mutable, state.frozen)

    def evaluation_variables(self, state: TrainState) -> Tree:
        """Returns `variables` with parameters replaced by the optimizer's averages, if it has any."""
        with jax.numpy_dtype_promotion("standard"):
            params = self.optimizer.evaluation_params(state.params, state.opt_state)
        return self.variables(replace(state, params=params))

    def evaluation_auxiliary(self, state: TrainState) -> Mapping[str, Tree]:
        """Returns the variables of the auxiliary models by name, with averages as in `evaluation_variables`."""
        with jax.numpy_dtype_promotion("standard"):
            return {name: each.evaluation_params(state.auxiliary[name]) for name, each in self.auxiliary.items()}

    @cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer of the model's parameters."""
        axes = self.model.variables.select(self.model.variables.axes, "trained")
        return widen_optimizer(self.optimizer.build(self.steps, axes))

    def _init_opt_state(self, params: Tree) -> Any:
        init = self.transformation.init
        return init(params) if self.outer is None else replicate(params, init, self.outer.replicas)

    def _microbatch_gradients(
        self, state: TrainState, mutable: Tree, batch: Batch, key: jax.Array
    ) -> tuple[Tree, Metrics, Tree]:
        frozen = {name: each.params for name, each in state.auxiliary.items() if each.opt_state is None}
        averages = self.evaluation_variables(state) if self.averaged else {}
        logits, mutable = _without_logits(mutable)

        def loss(trained: Tree) -> tuple[jax.Array, tuple[Metrics, Tree]]:
            variables = join({name: trained[name] for name in state.params}, mutable, state.frozen)
            auxiliary = {name: trained[name] for name in self.auxiliary if name not in frozen}
            model = self.model.training_model(variables, key)
            if self.qk_clip is not None:
                self.qk_clip.attach(model, logits)
            # The values before the forward pass, to find variables that it assigned.
            before = values_of(model)
            objective = self._objective(variables, {**frozen, **auxiliary}, averages=averages)
            value, metrics = self.model.transform.call(objective, model, batch, key=key)
            check_metrics(metrics)
            moved = self.model.variables.mutable_values(model, before)
            if self.qk_clip is not None:
                moved = {**moved, _LOGITS: self.qk_clip.read(model, logits)}
            return value, (metrics, moved)

        (_, (metrics, mutable)), gradients = jax.value_and_grad(loss, has_aux=True)(state.trained)
        return self._sharded(gradients), metrics, mutable

    def _objective(
        self, variables: Tree, auxiliary: Mapping[str, Tree], *, averages: Tree
    ) -> Callable[..., tuple[jax.Array, Metrics]]:
        """Binds the auxiliary models to the objective."""
        models = {name: self.auxiliary[name].merge(tree, variables) for name, tree in auxiliary.items()}
        models |= {name: self.model.evaluation_model(averages) for name in self.averaged}
        return partial(self.objective, **models) if models else self.objective

    @property
    def _staged(self) -> StagedModels:
        assert self.schedule is not None, "only with pipeline stages"
        return StagedModels(self.model, self.auxiliary, self.schedule)

    def _sharded(self, gradients: Tree) -> Tree:
        """Constrains gradients to the shardings of their parameters, which shards their sums and updates as well."""
        if in_mesh.value is None or in_mesh.value[0].size == 1:
            return gradients
        mesh, rules = in_mesh.value
        params, _, _ = self.model.variables.split(self.model.variables.shardings(rules, mesh))
        trained = ((name, each) for name, each in self.auxiliary.items() if each.optimizer is not None)
        auxiliary = {name: each.variables.shardings(rules, mesh) for name, each in trained}
        shardings = {**params, **auxiliary}
        inside = jax.sharding.get_abstract_mesh()
        if inside.manual_axes:  # in a replica, whose rules lack the manual axis
            shardings = jax.tree.map(lambda each: NamedSharding(inside, each.spec), shardings)
        return jax.lax.with_sharding_constraint(gradients, shardings)


def _without_logits(mutable: Tree) -> tuple[Any, Tree]:
    """Separates the largest logits of QK-clip, empty without it, from variables that the forward pass updates."""
    return mutable.get(_LOGITS, {}), {name: value for name, value in mutable.items() if name != _LOGITS}


def _family_and_config(model: Any) -> tuple[Any, Any]:
    if isinstance(model, tuple):
        family, config = model
        return family, config
    if hasattr(model, "name"):
        return registries.models[model.name], model
    if callable(model):
        return FunctionFamily(model), None
    raise ConfigError(
        f"The model is {model!r}; expected a function build(key) that returns an nnx.Module, the config of a model of "
        "a registered family, or a pair of a family and a config."
    )


def _no_runs(source: str) -> nnx.Module:
    raise ConfigError(
        f"The objective calls the model of {source!r}, which make_step cannot open. Give open_model, or name 'init', "
        "the trained model before the first step."
    )
