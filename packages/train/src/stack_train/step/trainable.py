"""The model that a run trains: its structure after the transforms, and the dtype and role of each variable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from stack_core.abi.errors import ConfigError
from stack_core.abi.models import ModelFamily
from stack_core.abi.transforms import ModelTransform
from stack_core.runtime.tree_paths import path_name
from stack_train.optim.optax_optimizer import Optimizer
from stack_train.step.precision import Precision, is_low_precision
from stack_train.transform import UNCHANGED
from stack_train.variables.model_variables import (
    Kind,
    ModelVariables,
    Path,
    Tree,
    cast_values,
    cast_variables,
    join,
    values_of,
)

__all__ = ["NO_PARAM", "FunctionFamily", "TrainableModel"]

NO_PARAM = nnx.Not(nnx.Param)

_MODEL_STREAM = 0x6D6F64  # folded into keys, distinct from the streams that an objective folds into its key


@dataclass(frozen=True)
class FunctionFamily:
    """A `ModelFamily` of one model, built by a function of a key."""

    function: Callable[[jax.Array], nnx.Module]
    name: str = "function"
    config_class: type = NoneType

    def build(self, config: None, *, key: jax.Array) -> nnx.Module:
        return self.function(key)


@dataclass(frozen=True)
class TrainableModel:
    """A model, and the roles of its variables in training.

    Attributes:
      family: model family.
      config: config of the model.
      optimizer: decides which parameters `optimizer.groups` freezes.
      precision: dtype of trained parameters. Frozen parameters have the `param_dtype` of `config`.
      transform: transform of the family's model; the transformed model is trained.
      trained: nnx filter of the variables that the optimizer updates. Variables with the metadata `trained=False`,
        that the transform excludes, or that `optimizer.groups` freezes, are not trained.
      mutable: nnx filter of other variables that the forward pass may update, in addition to variables with
        `trained=False`. All remaining variables are frozen.
    """

    family: ModelFamily
    config: Any
    optimizer: Optimizer
    precision: Precision = field(default_factory=Precision)
    transform: ModelTransform = UNCHANGED
    trained: Any = nnx.Param
    mutable: Any = NO_PARAM

    @property
    def abstract(self) -> Any:
        """The transformed model without values, with variables in their training dtypes."""
        return self.transform.apply(self._untransformed)

    @cached_property
    def variables(self) -> ModelVariables:
        """Structure of the transformed model."""
        return ModelVariables.of(self.abstract, self._kind_of)

    @cached_property
    def untransformed(self) -> ModelVariables:
        """Structure of the family's model before the transforms, whose variables `init` accepts."""
        return ModelVariables.of(self._untransformed)

    @property
    def trainable_paths(self) -> list[str]:
        """Paths of all trainable parameters, including parameters that `optimizer.groups` freezes."""
        flat = nnx.to_flat_state(nnx.state(self.abstract))
        return [path_name(path) for path, variable in flat if self._could_train(path, variable)]

    @property
    def module_names(self) -> set[str]:
        """Names of the top-level modules and variables."""
        return {str(path[0]) for path in self.variables.shapes}

    @property
    def parameter_count(self) -> int:
        """Entries of all parameters, frozen ones included."""
        params, _, frozen = self.variables.split(self.variables.abstract)
        return sum(leaf.size for leaf in jax.tree.leaves((params, frozen)))

    def init(self, initial: Tree, *, key: jax.Array) -> Tree:
        """Initializes all variables (pure).

        Args:
          initial: variables of the family's model, floats of any dtype. Missing variables are initialized from `key`.
        """
        built = self._build(key)
        variables = join(unflatten_mapping(values_of(built)), initial)
        values = cast_values(variables, self._dtypes)
        if self.transform == UNCHANGED:
            return values
        # A transform changes modules and their values together, so it takes the merged model.
        model = nnx.merge(nnx.split(built)[0], nnx.State(values))
        return unflatten_mapping(values_of(self.transform.apply(model)))

    def merge(self, variables: Tree, *, key: jax.Array | None = None) -> Any:
        """Builds the model from its variables; its random streams start from `key`."""
        return self.variables.merge(variables, key=key)

    def training_model(self, variables: Tree, key: jax.Array) -> Any:
        """Builds the model in training mode. Its random streams do not repeat other draws from `key`."""
        model = self.merge(variables, key=jax.random.fold_in(key, _MODEL_STREAM))
        model.train()
        return model

    def evaluation_model(self, variables: Tree) -> Any:
        """Builds the model in evaluation mode: no dropout, batch norms use running statistics."""
        model = self.merge(variables)
        model.eval()
        return model

    def _build(self, key: jax.Array) -> nnx.Module:
        # Parameters are sampled in their training dtype: bfloat16 samples have fewer distinct values.
        return self.family.build(self.precision.training_config(self.config), key=key)

    @cached_property
    def _untransformed(self) -> nnx.Module:
        # Shapes only: the values of a large model would not fit one device.
        return nnx.eval_shape(lambda: cast_variables(self._build(jax.random.key(0)), self._dtypes))

    @cached_property
    def _dtypes(self) -> Mapping[Path, Any]:
        """Training dtypes of the family's variables: trained ones by `precision`, others as in inference."""
        model = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        own = nnx.eval_shape(lambda: self.family.build(self.config, key=jax.random.key(0)))
        made, published = values_of(model), {path: value.dtype for path, value in values_of(own).items()}
        # Roles need the transformed model; they matter only if the two dtypes of a variable can differ.
        if all(value.dtype == published[path] and not is_low_precision(value.dtype) for path, value in made.items()):
            return published
        # Roles follow from the transform: adapters freeze the matrices that they wrap.
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

    def _could_train(self, path: Path, variable: Any) -> bool:
        """Checks whether a variable is trainable, ignoring `optimizer.groups`."""
        may = variable.get_metadata().get("trained", True) and nnx.filterlib.to_predicate(self.trained)(path, variable)
        return may and self.transform.trained(path, variable)

    def _kind_of(self, path: Path, variable: Any) -> Kind:
        if self._could_train(path, variable):
            return "frozen" if self.optimizer.freezes(path_name(path)) else "trained"
        # The forward pass updates variables with `trained=False`, such as selection biases, even without `mutable`.
        is_marked = not variable.get_metadata().get("trained", True)
        return "mutable" if is_marked or nnx.filterlib.to_predicate(self.mutable)(path, variable) else "frozen"
