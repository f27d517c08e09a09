"""A model's parameters, from the newest intact checkpoint of a run."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core import ops
from stack_core.config import differences, parse, parse_yaml, to_mapping
from stack_core.errors import ConfigError
from stack_core.mesh import ShardingRules, in_mesh
from stack_core.ops.building import is_quantized
from stack_core.plugins import registries
from stack_train.checkpoint import CheckpointStore, Restored
from stack_train.config import RunConfig
from stack_train.quantization import transform_of
from stack_train.run_directory import RunDirectory

__all__ = [
    "abstract_model",
    "abstract_params",
    "holds_codes",
    "load_model",
    "load_params",
    "run_config",
    "stored_model",
]


def run_config(run: Path) -> RunConfig:
    """Reads the resolved config of the run in a directory.

    Raises:
      RunDirectoryError: there is no run.
      ConfigError: its config does not fit what is installed.
    """
    directory = RunDirectory(run)
    return parse(RunConfig, parse_yaml(directory.config_yaml(), str(directory.config)))


def load_model(run: Path, config: RunConfig, shardings: Any = None) -> tuple[Any, int]:
    """Reads the model of a run, quantized if the run's is, and the number of steps that it was trained for.

    Args:
      config: the run's own.
      shardings: of the parameters, in their structure; a quantized array's is a tree, too. None puts each array where
        the rules put it inside of `use_mesh`, and all on the default device outside.

    Raises:
      ConfigError: the checkpoint was quantized by another recipe; says in what they differ.
      CheckpointError: no checkpoint can be used.
    """
    graph, state = nnx.split(stored_model(config))
    stored = nnx.to_pure_dict(state)
    if shardings is not None:
        stored = jax.tree.map(_abstract, stored, shardings)
    elif in_mesh.value is not None:
        placed = {path: _in_its_place(variable, *in_mesh.value) for path, variable in nnx.to_flat_state(state)}
        stored = unflatten_mapping(placed)
    restored = _restored(run, config, stored)
    return nnx.merge(graph, nnx.State(restored.state)), restored.step


def load_params(run: Path, config: Any, shardings: Any = None) -> Any:
    """Reads parameters, each to its place, and casts those that `config` holds in another dtype than the run.

    Quantized ones become the floats that they stand for; what a quantizer keeps beside them is left behind.

    Args:
      config: of the model; its `param_dtype` may differ from the run's.
      shardings: tree of shardings in the structure of the parameters; None puts all on the default device.

    Returns:
      The parameters as nested dicts.

    Raises:
      RunDirectoryError: there is no run.
      ConfigError: its checkpoint was quantized by another recipe than its config has.
      CheckpointError: no checkpoint can be used, or its model is another; names each parameter that differs.
    """
    saved = run_config(run)
    stored = _stored_params(replace(saved, model=replace(config, param_dtype=saved.model.param_dtype)))
    places = {} if shardings is None else flatten_mapping(shardings)
    stored = {path: _placed(leaf, places.get(path)) for path, leaf in flatten_mapping(stored).items()}
    restored = flatten_mapping(_restored(run, saved, unflatten_mapping(stored)).state)
    params = unflatten_mapping(
        {
            path: ops.dequantize(restored[path], wanted.dtype).astype(wanted.dtype)
            for path, wanted in flatten_mapping(abstract_params(config)).items()
        }
    )
    return params if shardings is None else jax.device_put(params, shardings)


def holds_codes(config: RunConfig) -> bool:
    """Whether a run's checkpoints hold quantized arrays."""
    return any(map(is_quantized, jax.tree.leaves(_stored_params(config), is_leaf=is_quantized)))


def abstract_model(config: Any) -> Any:
    """A model without values, from its config; nothing is allocated."""
    family = registries.models[config.family]
    return nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))


def stored_model(config: RunConfig) -> Any:
    """The model that a run's checkpoints hold, quantized if the run's is, without values."""
    return transform_of(config).apply(abstract_model(config.model))


def abstract_params(config: Any) -> Any:
    """Shapes and dtypes of a model's parameters as nested dicts; nothing is allocated."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def _stored_params(config: RunConfig) -> Any:
    """Shapes and dtypes of the parameters that a run's checkpoints hold, some of them quantized."""
    return nnx.to_pure_dict(nnx.state(stored_model(config)))


def _placed(leaf: Any, sharding: NamedSharding | None) -> Any:
    """The abstract array with its place; of a quantized one each part goes where the entries go that it is of."""
    if sharding is None:
        return leaf
    return jax.tree.map(lambda part: _abstract(part, _of_part(part.shape, sharding)), leaf)


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _of_part(shape: Sequence[int], sharding: NamedSharding) -> NamedSharding:
    """Codes and scales have the axes of their array; one that the mesh does not divide, as of one scale, is whole."""

    def divides(size: int, names: Any) -> bool:
        axes = names if isinstance(names, tuple) else (names,)
        return names is not None and size % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0

    names = zip(shape, sharding.spec, strict=False)
    return NamedSharding(sharding.mesh, PartitionSpec(*(name if divides(size, name) else None for size, name in names)))


def _in_its_place(variable: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """What an abstract variable holds, placed by its logical axes."""
    value = variable.get_value()
    return _placed(value, rules.sharding(mesh, variable.get_metadata("logical_axes"), value.shape))


def _restored(run: Path, config: RunConfig, abstract: Any) -> Restored:
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        step = store.latest()
        if step is not None:
            _check_recipe(store.path(step) / "config.yaml", config)
        return store.restore_params(abstract)


def _check_recipe(path: Path, config: RunConfig) -> None:
    """Raises where a checkpoint's config, if it is there to be read, has another recipe than the run's.

    A config without a recipe asks for a float model, which a run that trains by a recipe has, too.
    """
    saved = parse_yaml(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}
    lines = [
        line
        for name in registries.quantizers
        if name in saved and name in config.sections
        for line in differences(
            to_mapping(config.sections[name]), to_mapping(parse(registries.configs[name], saved[name])), name
        )
    ]
    if lines:
        listing = "\n  ".join(lines)
        raise ConfigError(
            f"Checkpoint {path.parent} was quantized by another recipe; here is the run's, not the checkpoint's:\n  "
            f"{listing}\nRestore the run's config, of which the checkpoint has a copy: {path}."
        )
