"""The variables of a model by kind: trained, updated by the forward pass, or frozen."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.abi.errors import TrainingError
from stack_core.abi.mesh import DEFAULT_RULES, LogicalAxes, MeshAxes, ShardingRules
from stack_core.abi.models import ModelFamily, ShardsItself
from stack_core.ops.building import is_quantized
from stack_core.runtime.tree_paths import path_name

__all__ = [
    "Kind",
    "ModelVariables",
    "Path",
    "Tree",
    "cast_values",
    "cast_variables",
    "join",
    "part_sharding",
    "sharding_rules",
    "stored_values",
    "values_of",
    "variable_shardings",
]

Path = tuple[Any, ...]
Tree = Mapping[Any, Any]
"""Nested dicts of values, shapes or shardings. A value has the same path as its variable in the model."""

Kind = Literal["trained", "mutable", "frozen", "random"]
"""Role of a variable in a step: updated by the optimizer, updated by the forward pass, never updated, or a random
stream that restarts from the step's key."""

_STORED: tuple[Kind, ...] = ("trained", "mutable", "frozen")
"""Kinds of variables that have values between steps."""


def _as_it_is(path: Path, variable: Any) -> Kind:
    return "frozen"


@dataclass(frozen=True, eq=False)
class ModelVariables:
    """Structure of a model without values.

    Attributes:
      graph: nnx graph definition of the model.
      shapes: shape and dtype of each variable; a tree for a quantized array.
      axes: logical axes of each variable; None for an axis without a name.
      kinds: role of each variable in a step.
    """

    graph: Any
    shapes: Mapping[Path, Any]
    axes: Mapping[Path, tuple[str | None, ...]]
    kinds: Mapping[Path, Kind]

    @classmethod
    def of(cls, model: nnx.Module, kind_of: Callable[[Path, Any], Kind] = _as_it_is) -> "ModelVariables":
        """Describes an abstract model.

        Args:
          kind_of: returns the kind of a variable; not called for random streams.

        Raises:
          TrainingError: a variable does not hold an array, or a trained variable is not an array of floats; names the
            variable.
        """
        graph, state = nnx.split(model)
        variables = dict(nnx.to_flat_state(state))
        kinds: dict[Path, Kind] = {
            path: "random" if isinstance(variable, nnx.RngState) else kind_of(path, variable)
            for path, variable in variables.items()
        }
        for path, kind in kinds.items():
            if kind == "trained":
                _check_trainable(path, variables[path].get_value())
        return cls(
            graph=graph,
            shapes={path: variable.get_value() for path, variable in variables.items()},
            axes={path: _axes(path, variable) for path, variable in variables.items()},
            kinds=kinds,
        )

    def paths(self, *kinds: Kind) -> tuple[Path, ...]:
        return tuple(path for path, kind in self.kinds.items() if kind in kinds)

    def select(self, values: Mapping[Path, Any], *kinds: Kind) -> Tree:
        """Selects the values of the variables of some kinds, as nested dicts."""
        return unflatten_mapping({path: values[path] for path in self.paths(*kinds)})

    def split(self, tree: Tree) -> tuple[Tree, Tree, Tree]:
        """Splits the values of all variables into trained, mutable and frozen ones."""
        values = flatten_mapping(tree)
        return self.select(values, "trained"), self.select(values, "mutable"), self.select(values, "frozen")

    @cached_property
    def abstract(self) -> Tree:
        """Shapes and dtypes of all variables that have values between steps."""
        return self.select(self.shapes, *_STORED)

    @cached_property
    def logical_axes(self) -> Tree:
        """The logical axis names of all variables that have values between steps, as nested dicts."""
        return self.select(self.axes, *_STORED)

    @property
    def trained(self) -> Tree:
        """Shapes and dtypes of the variables that the optimizer updates."""
        return self.select(self.shapes, "trained")

    @cached_property
    def staged_paths(self) -> frozenset[Path]:
        """Paths of the variables that pipeline stages divide: variables of the layers with the most repetitions."""
        stacked = {path: self.shapes[path].shape[0] for path, axes in self.axes.items() if axes[:1] == ("layers",)}
        return frozenset(path for path, layers in stacked.items() if layers == max(stacked.values()))

    def shardings(self, rules: ShardingRules, mesh: Mesh) -> Tree:
        """Computes the shardings of the variables that have values between steps, as nested dicts."""
        shapes = flatten_mapping(self.abstract)
        axes = {path: self.axes[path] for path in shapes}
        # Every stage has the layers before and after the divided ones.
        whole = (path for path, names in axes.items() if names[:1] == ("layers",) and path not in self.staged_paths)
        axes |= {path: (None, *axes[path][1:]) for path in whole}
        return unflatten_mapping(variable_shardings(shapes, axes, rules, mesh))

    def merge(self, tree: Tree, *, key: jax.Array | None = None) -> Any:
        """Builds the model with the values of `tree`.

        Args:
          tree: values of all variables except random streams.
          key: PRNG key of the random streams; `jax.random.key(0)` by default.
        """
        streams = self._random_streams(jax.random.key(0) if key is None else key)
        return nnx.merge(self.graph, nnx.State(unflatten_mapping({**flatten_mapping(tree), **streams})))

    def mutable_values(self, model: Any, before: Mapping[Path, Any]) -> Tree:
        """Returns the values of the updatable variables after a forward pass.

        Args:
          model: model after the forward pass.
          before: values of all variables before the forward pass.

        Raises:
          TrainingError: the forward pass assigned another variable, or a value of another shape or dtype.
        """
        after = values_of(model)
        # An optimizer or a checkpoint source would overwrite such an assignment without a notice.
        for path in self.paths("trained", "frozen"):
            if not _is_same(after[path], before[path]):
                raise TrainingError(
                    f"The forward pass assigns variable {path_name(path)!r}, which is {self.kinds[path]}: the value "
                    "would be lost. Hold it in an nnx.BatchStat or another nnx.Variable, or give the nnx.Param the "
                    "metadata trained=False."
                )
        for path in self.paths("mutable"):
            _check_same_shape(path, after[path], before[path])
        return self.select(after, "mutable")

    def _random_streams(self, key: jax.Array) -> dict[Path, Any]:
        streams: dict[Path, Any] = {}
        for place, path in enumerate(self.paths("random")):
            shape = self.shapes[path]
            if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
                streams[path] = jax.random.split(jax.random.fold_in(key, place), shape.shape)
            else:
                # Counts of samples restart at 0, because the key is different in every step.
                streams[path] = jnp.zeros(shape.shape, shape.dtype)
        return streams


def values_of(model: nnx.Module) -> dict[Path, Any]:
    """Returns the values of a model's variables by path."""
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def stored_values(model: nnx.Module) -> Tree:
    """Returns the values of a model's variables as nested dicts, without random streams."""
    flat = nnx.to_flat_state(nnx.state(model))
    return unflatten_mapping({path: item.get_value() for path, item in flat if not isinstance(item, nnx.RngState)})


def cast_values(tree: Tree, dtypes: Mapping[Path, Any]) -> Tree:
    """Casts floats, or their shapes, to the dtypes given by path; other values are unchanged."""

    def cast(path: Path, value: Any) -> Any:
        # A quantized array has its own dtypes for codes and scales.
        if path not in dtypes or is_quantized(value) or value.dtype == dtypes[path]:
            return value
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return (
            value.update(dtype=dtypes[path]) if isinstance(value, jax.ShapeDtypeStruct) else value.astype(dtypes[path])
        )

    return unflatten_mapping({path: cast(path, value) for path, value in flatten_mapping(tree).items()})


def cast_variables(model: nnx.Module, dtypes: Mapping[Path, Any]) -> Any:
    """Returns the model with float variables cast to the dtypes given by path."""
    return nnx.merge(nnx.split(model)[0], nnx.State(cast_values(unflatten_mapping(values_of(model)), dtypes)))


def join(*trees: Tree) -> Tree:
    """Merges several trees; later trees take precedence."""
    return unflatten_mapping({path: value for tree in trees for path, value in flatten_mapping(tree).items()})


def sharding_rules(family: ModelFamily, overrides: Mapping[str, MeshAxes]) -> ShardingRules:
    """Returns the sharding rules of a run: `overrides` over the family's rules over the default rules."""
    own = family.rules if isinstance(family, ShardsItself) else {}
    return DEFAULT_RULES.updated({**own, **overrides})


def variable_shardings(
    shapes: Mapping[Path, Any], axes: Mapping[Path, LogicalAxes], rules: ShardingRules, mesh: Mesh
) -> dict[Path, Any]:
    """Computes the sharding of each variable from its logical axes; a quantized array has a tree of shardings.

    Raises:
      ShardingError: names every variable whose axes lack a rule, collide or do not divide.
    """
    # Rules apply to logical shapes, which quantized arrays have too (`QView`).
    whole = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in shapes.items()}
    shardings = flatten_mapping(rules.tree_shardings(mesh, unflatten_mapping(whole), unflatten_mapping(dict(axes))))
    return {
        path: jax.tree.map(lambda part, sharding=shardings[path]: part_sharding(part.shape, sharding), value)
        if is_quantized(value)
        else shardings[path]
        for path, value in shapes.items()
    }


def part_sharding(shape: Sequence[int], sharding: NamedSharding) -> NamedSharding:
    """Computes the sharding of the codes or scales of an array; axes that the mesh does not divide are replicated."""

    # An axis of blocks has fewer scales than entries, perhaps fewer than the mesh has devices.
    def divides(size: int, names: Any) -> bool:
        axes = names if isinstance(names, tuple) else (names,)
        return names is not None and size % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0

    names = zip(shape, sharding.spec, strict=False)
    return NamedSharding(sharding.mesh, PartitionSpec(*(name if divides(size, name) else None for size, name in names)))


def _axes(path: Path, variable: Any) -> tuple[str | None, ...]:
    value = variable.get_value()
    shape = getattr(value, "shape", None)
    if shape is None:
        raise TrainingError(
            f"Variable {path_name(path)!r} holds a {type(value).__name__}; a trainer takes models whose variables hold "
            "arrays. Hold it as a plain attribute of the module."
        )
    axes = variable.get_metadata().get("logical_axes")
    return tuple(axes) if axes is not None else (None,) * len(shape)


def _check_trainable(path: Path, value: Any) -> None:
    if is_quantized(value):
        problem = "holds codes of a quantized array"
    elif not jnp.issubdtype(getattr(value, "dtype", jnp.dtype(object)), jnp.floating):
        problem = f"holds {getattr(value, 'dtype', type(value).__name__)}"
    else:
        return
    raise TrainingError(
        f"Variable {path_name(path)!r} {problem}; only floats can be trained. Hold it in another nnx.Variable than "
        "nnx.Param, give it the metadata trained=False, or freeze it by optimizer.groups."
    )


def _is_same(after: Any, before: Any) -> bool:
    """Checks whether two values have identical leaves; nnx rebuilds the containers of quantized arrays."""
    (ours, structure), (theirs, expected) = jax.tree.flatten(after), jax.tree.flatten(before)
    # Identity instead of equality, because inside a step values are tracers.
    return structure == expected and all(new is old for new, old in zip(ours, theirs, strict=True))


def _check_same_shape(path: Path, after: Any, before: Any) -> None:
    found, expected = (f"{x.dtype}{list(x.shape)}" for x in (after, before))
    if found != expected:
        raise TrainingError(
            f"The forward pass assigns {found} to variable {path_name(path)!r}, which holds {expected}. A step keeps "
            "shapes and dtypes: cast what is assigned."
        )
