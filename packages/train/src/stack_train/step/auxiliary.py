"""Auxiliary models: models that an objective calls in addition to the trained one, such as a reference or a critic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import optax
from flax import nnx
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.runtime.tree_paths import path_name
from stack_train.optim.optax_optimizer import Optimizer
from stack_train.optim.placement import like_parameters
from stack_train.step.precision import Precision, apply_updates, widen, widen_optimizer
from stack_train.step.state import AuxiliaryState
from stack_train.variables.model_variables import Kind, ModelVariables, Path, Tree, cast_variables, join, values_of

__all__ = ["AVERAGE", "INIT", "AuxiliaryModel", "auxiliary_models", "trained_model"]

INIT: Final = "init"
"""Source of a frozen copy of the trained model at the start of training."""

AVERAGE: Final = "average"
"""Source of the weights that are evaluated: the optimizer's average, or the trained weights if it keeps none.

The step takes them from its state, so they are no `AuxiliaryModel`.
"""


@dataclass(frozen=True, eq=False)
class AuxiliaryModel:
    """A model that an objective calls, constructed by `auxiliary_models` or `trained_model`.

    Attributes:
      name: keyword of the objective's argument.
      open: returns the structure of the model; called on first use.
      source: `INIT` or "run:DIRECTORY" for frozen models; "" for trained models.
      build: builds a trained model from a key; None for frozen models.
      optimizer: optimizer of a trained model, whose groups match paths that begin with `name`; None for frozen models.
      steps: total number of updates, which the learning-rate schedule spans.
    """

    name: str
    open: Callable[[], ModelVariables]
    source: str = ""
    build: Callable[[jax.Array], Any] | None = None
    optimizer: Optimizer | None = None
    steps: int = 1

    @cached_property
    def variables(self) -> ModelVariables:
        """Structure of the model."""
        return self.open()

    @cached_property
    def abstract(self) -> AuxiliaryState:
        """Shapes and dtypes of the state."""
        params = self._stored(self.variables.abstract)
        opt_state = None if self.optimizer is None else jax.eval_shape(self._optax.init, {self.name: params})
        return AuxiliaryState(params, opt_state)

    @property
    def paths(self) -> list[str]:
        """The paths of all parameters, in the form that patterns of optimizer groups match."""
        return [path_name((self.name, *path)) for path in flatten_mapping(self.variables.abstract)]

    def init(self, initial: Tree, *, key: jax.Array | None = None) -> AuxiliaryState:
        """Initializes the state of a trained model, or copies the initial model.

        Args:
          initial: initial variables of the run's model.
          key: PRNG key of a trained model.
        """
        if self.build is not None and key is not None:
            params = self.variables.select(values_of(self.build(key)), "trained")
            return AuxiliaryState(params, self._optax.init({self.name: params}))
        # Copied, as the trained parameters are donated to the first step.
        return AuxiliaryState(jax.tree.map(jax.numpy.copy, self._stored(initial)))

    def shardings(self, variables: Tree, replicated: Any) -> AuxiliaryState:
        """Derives the shardings of the state from the shardings of all variables of the model."""
        params = self._stored(variables)
        if self.optimizer is None:
            return AuxiliaryState(params)
        shapes = {self.name: self.abstract.params}
        return AuxiliaryState(params, like_parameters(self.abstract.opt_state, shapes, {self.name: params}, replicated))

    def merge(self, params: Tree, trained: Tree) -> Any:
        """Builds the model; frozen models are in evaluation mode.

        Args:
          params: variables in the state.
          trained: all variables of the trained model, whose frozen variables a copy of the initial model shares.
        """
        model = self.variables.merge(join(trained, params) if self.source == INIT else params)
        if self.optimizer is None:
            # A frozen model gives reference values, which dropout would make random.
            model.eval()
        return model

    def update(self, state: AuxiliaryState, gradients: Tree, *, key: jax.Array) -> tuple[AuxiliaryState, Metrics]:
        """Returns the next state and the gradient norm before clipping. Requires standard dtype promotion."""
        named = {self.name: state.params}
        updates, opt_state = self._optax.update({self.name: gradients}, state.opt_state, named)
        params: Any = apply_updates(named, updates, key=key)
        norm = Metric.mean(optax.tree.norm(widen(gradients)))
        return AuxiliaryState(params[self.name], opt_state), {f"{self.name}_grad_norm": norm}

    def evaluation_params(self, state: AuxiliaryState) -> Tree:
        """Returns the parameters for evaluation: the optimizer's averages, if it has any."""
        if self.optimizer is None:
            return state.params
        return self.optimizer.evaluation_params({self.name: state.params}, state.opt_state)[self.name]

    def _stored(self, tree: Tree) -> Tree:
        # Training never changes frozen variables, so the copy shares them with the run's model (see `merge`).
        if self.source != INIT:
            return tree
        params, mutable, _ = self.variables.split(tree)
        return join(params, mutable)

    @cached_property
    def _optax(self) -> optax.GradientTransformation:
        assert self.optimizer is not None, "frozen models have no optimizer"
        return widen_optimizer(self.optimizer.build(self.steps, {self.name: self.variables.logical_axes}))


def trained_model(
    name: str,
    make: Callable[..., Any],
    model_config: Any,
    optimizer: Optimizer,
    steps: int,
    precision: Precision,
) -> AuxiliaryModel:
    """Describes a new model that is trained together with the run's model.

    Args:
      make: `make(model_config, *, key)` builds the model.

    Raises when its structure is first used:
      TrainingError: a variable is not an nnx.Param.
      ConfigError: a group of the optimizer freezes a parameter.
    """

    def build(key: jax.Array) -> Any:
        built = make(precision.training_config(model_config), key=key)
        # All variables of such a model are trained (`kind_of`), so all have the trained dtype.
        dtypes = {path: precision.trained_dtype(value.dtype) for path, value in values_of(built).items()}
        return cast_variables(built, dtypes)

    def kind_of(path: Path, variable: Any) -> Kind:
        full_name = path_name((name, *path))
        # Updates of other variables would be lost: an auxiliary state holds only parameters.
        if not isinstance(variable, nnx.Param):
            raise TrainingError(
                f"Variable {full_name!r} of a model that the objective trains is a {type(variable).__name__}; hold it "
                "in an nnx.Param, or as a plain attribute of the module."
            )
        if optimizer.freezes(full_name):
            raise ConfigError(
                f"optimizer.groups freezes {full_name!r}, which the objective trains. Write another pattern."
            )
        return "trained"

    def structure() -> ModelVariables:
        return ModelVariables.of(nnx.eval_shape(lambda: build(jax.random.key(0))), kind_of)

    return AuxiliaryModel(name, structure, "", build, optimizer, steps)


def auxiliary_models(
    declared: Mapping[str, str | Callable[..., Any]],
    initial: Callable[[], ModelVariables],
    open_model: Callable[[str], nnx.Module],
    *settings: Any,
) -> Mapping[str, AuxiliaryModel]:
    """Describes the models that an objective declares in `Objective.auxiliary_models`, by name.

    Args:
      initial: returns the structure of the trained model.
      open_model: returns the model of a source "run:DIRECTORY" without values.
      settings: the arguments of `trained_model` after `make`.
    """

    def describe(name: str, declaration: str | Callable[..., Any]) -> AuxiliaryModel:
        if not isinstance(declaration, str):
            return trained_model(name, declaration, *settings)
        if declaration == INIT:
            return AuxiliaryModel(name, initial, INIT)
        return AuxiliaryModel(name, lambda: ModelVariables.of(open_model(declaration)), declaration)

    return {name: describe(name, declaration) for name, declaration in declared.items()}
