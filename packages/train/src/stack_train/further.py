"""Auxiliary models that an objective trains together with the run's model, such as a critic or a reward head."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import optax
from flax import nnx
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.training import Objective, TrainsModels
from stack_core.abi.tree_paths import path_name
from stack_train.optim.optax_optimizer import Optimizer
from stack_train.optim.placement import like_parameters
from stack_train.precision import Precision, apply_updates, widen, widen_optimizer
from stack_train.variables import Kind, ModelVariables, Path, Tree, cast_variables, values_of

__all__ = ["FurtherModel", "FurtherState", "further_models"]


@partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state"], meta_fields=[])
@dataclass(frozen=True)
class FurtherState:
    """Parameters and optimizer state of an auxiliary model, or their shapes or shardings in the same structure."""

    params: Any
    opt_state: Any


@dataclass(frozen=True)
class FurtherModel:
    """An auxiliary model of the objective, with its own optimizer state.

    Attributes:
      name: name of the model, by which the objective receives it.
      make: `make(model_config, *, key)` builds the model.
      model_config: config of the run's model.
      optimizer: optimizer settings of the run; their groups match paths that begin with `name`.
      steps: total number of updates.
      precision: dtype of trained parameters.
    """

    name: str
    make: Callable[..., Any]
    model_config: Any
    optimizer: Optimizer
    steps: int
    precision: Precision = field(default_factory=Precision)

    def init(self, *, key: jax.Array) -> FurtherState:
        params = self.model.select(values_of(self._build(key)), "trained")
        return FurtherState(params, self._optimizer.init({self.name: params}))

    def update(self, state: FurtherState, gradients: Tree, *, key: jax.Array) -> tuple[FurtherState, Metrics]:
        """Returns the next state and the gradient norm before clipping. Requires standard dtype promotion."""
        named = {self.name: state.params}
        updates, opt_state = self._optimizer.update({self.name: gradients}, state.opt_state, named)
        params: Any = apply_updates(named, updates, key=key)
        norm = Metric.mean(optax.tree.norm(widen(gradients)))
        return FurtherState(params[self.name], opt_state), {f"{self.name}_grad_norm": norm}

    def evaluated(self, state: FurtherState) -> Tree:
        """Returns the parameters for evaluation: the optimizer's averages, if it has any."""
        return self.optimizer.evaluation_params({self.name: state.params}, state.opt_state)[self.name]

    def shardings(self, params: Tree, replicated: Any) -> FurtherState:
        """Derives the shardings of the state from the shardings of the parameters."""
        shapes = {self.name: self.model.abstract}
        abstract = jax.eval_shape(self._optimizer.init, shapes)
        return FurtherState(params, like_parameters(abstract, shapes, {self.name: params}, replicated))

    @property
    def abstract(self) -> FurtherState:
        """Shapes and dtypes of the state."""
        shapes = self.model.abstract
        return FurtherState(shapes, jax.eval_shape(self._optimizer.init, {self.name: shapes}))

    @property
    def paths(self) -> list[str]:
        """The paths of all parameters, as patterns of optimizer groups see them."""
        return [path_name((self.name, *path)) for path in flatten_mapping(self.model.abstract)]

    @cached_property
    def model(self) -> ModelVariables:
        """Variables of the model, without values.

        Raises:
          TrainingError: a variable is not an nnx.Param.
          ConfigError: a group freezes a parameter.
        """
        return ModelVariables.of(nnx.eval_shape(lambda: self._build(jax.random.key(0))), self._kind)

    def _build(self, key: jax.Array) -> Any:
        built = self.make(self.precision.training_config(self.model_config), key=key)
        dtypes = {path: self.precision.trained_dtype(value.dtype) for path, value in values_of(built).items()}
        return cast_variables(built, dtypes)

    def _kind(self, path: Path, variable: Any) -> Kind:
        name = path_name((self.name, *path))
        if not isinstance(variable, nnx.Param):
            raise TrainingError(
                f"Variable {name!r} of a model that the objective trains is a {type(variable).__name__}; hold it in an "
                "nnx.Param, or as a plain attribute of the module."
            )
        if self.optimizer.freezes(name):
            raise ConfigError(f"optimizer.groups freezes {name!r}, which the objective trains. Write another pattern.")
        return "trained"

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        axes = {self.name: self.model.select(self.model.axes, "trained")}
        return widen_optimizer(self.optimizer.build(self.steps, axes))


def further_models(
    objective: Objective,
    model_config: Any,
    optimizer: Optimizer,
    steps: int,
    precision: Precision,
    *,
    taken: Iterable[str],
) -> Mapping[str, FurtherModel]:
    """Builds the auxiliary models that an objective trains, by name.

    Args:
      taken: reserved names: companions, and top-level modules of the run's model.

    Raises:
      ConfigError: a name is taken.
    """
    made = objective.trained_models if isinstance(objective, TrainsModels) else {}
    if same := sorted({*made} & {*taken}):
        raise ConfigError(
            f"The objective trains a model {same[0]!r}, which is the name of a companion or of a module of the run's "
            "model. Call it otherwise."
        )
    return {name: FurtherModel(name, make, model_config, optimizer, steps, precision) for name, make in made.items()}
