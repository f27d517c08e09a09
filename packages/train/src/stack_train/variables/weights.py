"""Reading of model variables from checkpoints of runs and from published checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import NamedSharding

from stack_core import ops
from stack_core.abi.config import differences, parse, parse_yaml, to_mapping
from stack_core.abi.errors import CheckpointError, ConfigError
from stack_core.abi.formats import StartingPoint
from stack_core.abi.local_paths import local_path
from stack_core.abi.mesh import in_mesh
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.tree_paths import path_name
from stack_train.checkpoint import CheckpointStore, FrozenRecord
from stack_train.checkpoint.manifest import read_documents, read_manifest
from stack_train.checkpoint.reading import CONFIG
from stack_train.optim.optax_optimizer import as_optimizer
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_params, stored_model
from stack_train.run.program import single_device_program
from stack_train.run.start import Start, open_start
from stack_train.run.transforms import transform_of
from stack_train.step.auxiliary import INIT
from stack_train.step.program import Program
from stack_train.step.state import AuxiliaryState, TrainState
from stack_train.variables.model_variables import (
    ModelVariables,
    Tree,
    cast_values,
    part_sharding,
    values_of,
    variable_shardings,
)
from stack_train.variables.model_variables import Path as _Path

__all__ = ["init_state", "read_model", "read_params", "restore_frozen"]


def read_model(run: Path, config: RunConfig, shardings: Any = None) -> tuple[Any, int]:
    """Reads a run's model from its newest intact checkpoint; the model is quantized if the run's model is.

    Args:
      config: config of the run.
      shardings: shardings in the structure of the parameters, with a tree of shardings for a quantized array. None uses
        the sharding rules inside `use_mesh`, and the default device otherwise.

    Returns:
      The model, and the number of steps for which it was trained.

    Raises:
      ConfigError: the checkpoint was quantized with a different recipe; names the settings that differ.
      CheckpointError: no checkpoint can be used.
    """
    model = ModelVariables.of(stored_model(config))
    shapes = flatten_mapping(model.abstract)
    if shardings is not None:
        places = flatten_mapping(shardings)
    elif in_mesh.value is not None:
        mesh, rules = in_mesh.value
        places = variable_shardings(shapes, {path: model.axes[path] for path in shapes}, rules, mesh)
    else:
        places: dict[Any, Any] = {}
    variables, step = _read(run, config, shapes, places)
    return model.merge(variables), step


def read_params(
    run: Path,
    config: Any,
    shardings: Tree | None = None,
    *,
    step: int | None = None,
    dtypes: Mapping[_Path, Any] | None = None,
) -> tuple[Tree, int]:
    """Reads the variables of a run's model, sharded by `shardings` and cast to the dtypes of `config`.

    Adapters are merged and quantized parameters are dequantized. Auxiliary variables of a quantizer are dropped.

    Args:
      run: directory of the run.
      config: config of the model; its `param_dtype` may differ from the run's.
      shardings: shardings of the variables; None puts all variables on the default device.
      step: step of the checkpoint to read; None reads the newest intact one.
      dtypes: dtypes by path that override the dtypes of `config`.

    Returns:
      The variables, and the step of their checkpoint.

    Raises:
      RunDirectoryError: `run` is not a run directory.
      ConfigError: the checkpoint was quantized with a different recipe than the run's config has.
      CheckpointError: no checkpoint can be used, or its model is different; names each parameter that differs.
    """
    saved, dtypes = run_config(run), dtypes or {}
    stored = replace(saved, model=replace(config, param_dtype=saved.model.param_dtype))
    model, transform = ModelVariables.of(stored_model(stored)), transform_of(stored)
    # The run's checkpoint may hold float32 values of parameters that `config` publishes in bfloat16.
    shapes = flatten_mapping(cast_values(model.abstract, dtypes))
    # `shardings` describe the merged model. Models to merge are loaded on the default device and sharded afterwards.
    places = {} if shardings is None or transform.merges else flatten_mapping(shardings)
    restored, step = _read(run, saved, shapes, places, step)
    values = values_of(transform.merged(model.merge(restored))) if transform.merges else flatten_mapping(restored)
    wanted = flatten_mapping(cast_values(abstract_params(config), dtypes))
    params = unflatten_mapping(
        {path: ops.dequantize(values[path], leaf.dtype).astype(leaf.dtype) for path, leaf in wanted.items()}
    )
    return (params if shardings is None else jax.device_put(params, shardings)), step


def _read_start(program: Program, config: RunConfig, start: Start, step: int | None = None) -> tuple[Tree, int]:
    """Reads the values that a run starts from, in the dtypes and shardings of its program.

    Args:
      step: step of the checkpoint of a run; None reads the newest intact one.

    Returns:
      The values, and the step of their checkpoint, or 0 if they are published.
    """
    variables = flatten_mapping(program.initial_variables)
    if start.published is not None:
        return _read_published(start.published, start.source, variables), 0
    shardings = unflatten_mapping({path: leaf.sharding for path, leaf in variables.items()})
    dtypes = {path: leaf.dtype for path, leaf in variables.items()}
    directory = Path(start.source.removeprefix("run:"))
    return read_params(directory, config.model, shardings, step=step, dtypes=dtypes)


def _read_published(published: StartingPoint, source: str, variables: Mapping[_Path, Any]) -> Tree:
    """Reads the variables one by one from a published checkpoint, "FORMAT:DIR".

    Raises:
      CheckpointError: the parameters of the checkpoint differ in name or shape from the run's model.
    """
    paths, values = {path_name(path): path for path in variables}, dict[_Path, jax.Array]()
    for name, leaf in published.leaves():
        like = variables.get(paths.get(name, ()))
        if like is None or like.shape != leaf.shape:
            here = "has none of this name" if like is None else f"expects {like.shape}"
            raise CheckpointError(f"Parameter {name!r} of {source} has shape {leaf.shape}; the run's model {here}.")
        # Cast on the host, so only the final dtype is copied to the device.
        values[paths[name]] = jax.device_put(leaf.astype(like.dtype), like.sharding)
    if missing := [name for name, path in paths.items() if path not in values]:
        raise CheckpointError(f"{source} lacks parameters of the run's model: {', '.join(missing)}.")
    return unflatten_mapping(values)


def init_state(program: Program, config: RunConfig, start: Start | None) -> tuple[TrainState, dict[str, FrozenRecord]]:
    """Returns the state before the first step and the sources of frozen variables by model name.

    Args:
      start: the opened `run.init_from`; None initializes all variables from the run's seed.
    """
    given: Tree = {}
    source, step = INIT, 0
    if start is not None:
        source = start.source
        given, step = _read_start(program, config, start)
    loaded = {name: _read_auxiliary(program, name) for name in program.saved_auxiliary}
    auxiliary = {name: variables for name, (variables, _) in loaded.items()}
    state = program.init(given, key=jax.random.key(config.run.seed), auxiliary=auxiliary)
    records = {}
    copies = {name: each.params for name, each in state.auxiliary.items() if each.opt_state is None}
    for name, variables in {"model": state.frozen, **copies}.items():
        address = f"run:{_saved_run(program, name)}" if name in loaded else source
        if jax.tree.leaves(variables):
            records[name] = FrozenRecord.of(variables, source=address, step=loaded[name][1] if name in loaded else step)
    return state, records


def restore_frozen(
    state: TrainState, program: Program, config: RunConfig, records: Mapping[str, FrozenRecord]
) -> TrainState:
    """Adds the frozen variables and auxiliary models, which checkpoints do not contain, to a restored state.

    Variables come from their source again, or from the run's seed.

    Args:
      records: sources and digests of the variables by model name, from the checkpoint.

    Raises:
      CheckpointError: the values of a source have changed since; names each variable.
    """
    frozen, auxiliary = _init_frozen(program, config, records)
    for name in program.saved_auxiliary:
        # The step of this run's start: the source may have newer checkpoints since.
        auxiliary[name], _ = _read_auxiliary(program, name, records[name].step)
    for name, variables in {"model": frozen, **auxiliary}.items():
        if name in records:
            records[name].check(variables)
    copies = {name: AuxiliaryState(variables) for name, variables in auxiliary.items()}
    return replace(state, frozen=frozen, auxiliary={**state.auxiliary, **copies})


def _init_frozen(
    program: Program, config: RunConfig, records: Mapping[str, FrozenRecord]
) -> tuple[Tree, dict[str, Tree]]:
    """Initializes the frozen variables of a run's model, and the copies of the initial model by name."""
    made = {"model", *program.step.auxiliary}.difference(program.saved_auxiliary)
    own = [record for name, record in records.items() if name in made]
    if not own:
        return {}, {}
    given: Tree = {}
    # Model and copies have one source, so the first record stands for all.
    if own[0].source != INIT:
        given, _ = _read_start(program, config, open_start(own[0].source), own[0].step)
    frozen, copies = program.init_frozen(given, key=jax.random.key(config.run.seed))
    return frozen, {name: each.params for name, each in copies.items()}


def _read_auxiliary(program: Program, name: str, step: int | None = None) -> tuple[Tree, int]:
    """Reads the variables of an auxiliary model from another run, and returns them and the step of its checkpoint."""
    run = _saved_run(program, name)
    shapes = flatten_mapping(program.step.auxiliary[name].variables.abstract)
    places = flatten_mapping(program.state_shardings.auxiliary[name].params)
    return _read(run, run_config(run), shapes, places, step)


def _saved_run(program: Program, name: str) -> Path:
    """Returns the directory of the run with the weights of a frozen auxiliary model."""
    return local_path(program.step.auxiliary[name].source.removeprefix("run:")).absolute()


def _read(
    run: Path, config: RunConfig, shapes: Mapping[_Path, Any], places: Mapping[_Path, Any], step: int | None = None
) -> tuple[Tree, int]:
    """Restores the variables of a run's model from a checkpoint, or from the newest intact one if `step` is None.

    Trained variables are averages if the optimizer maintains them, and frozen variables come from their source.

    Args:
      shapes: shapes and dtypes of the variables, by path.
      places: shardings by path; empty for the default device.

    Returns:
      The variables, and the step of the checkpoint.
    """
    abstract = unflatten_mapping({path: _with_sharding(leaf, places.get(path)) for path, leaf in shapes.items()})
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        latest = store.latest() if step is None else step
        if latest is not None:
            # First, because codes of another recipe can have the same shapes and pass the checks of the leaves.
            _check_recipe(store.path(latest), config)
        restored = store.restore_variables(abstract, step)
        if restored.step != latest:  # the latest is damaged
            _check_recipe(store.path(restored.step), config)
        # A checkpoint of weights stores the averages themselves.
        averages = as_optimizer(config.optimizer).averages and restored.kind != "weights"
        # Then the checkpoint holds every value directly.
        if not (averages or "model" in restored.frozen):
            return restored.state, restored.step
        program = single_device_program(config)
        variables = flatten_mapping(restored.state)
        if "model" in restored.frozen:
            frozen, _ = _init_frozen(program, config, restored.frozen)
            # The source of these variables may have changed since the run began.
            restored.frozen["model"].check(frozen)
            variables |= flatten_mapping(frozen)
        if averages:
            state = program.abstract_state
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.opt_state)
            opt_state = store.restore_params(shapes, restored.step, under="opt_state").state
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params)
            # Averages are computed from the parameters in their trained dtype, so these are read again without a cast.
            params = store.restore_params(shapes, restored.step).state
            with jax.numpy_dtype_promotion("standard"):
                averaged = as_optimizer(config.optimizer).evaluation_params(params, opt_state)
            variables |= flatten_mapping(averaged)
    tree = cast_values(
        unflatten_mapping(variables), {path: leaf.dtype for path, leaf in flatten_mapping(abstract).items()}
    )
    return (jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, abstract)) if places else tree), restored.step


def _with_sharding(leaf: Any, sharding: Any) -> Any:
    """Adds a sharding to an abstract array; each part of a quantized array is sharded like the entries it describes."""
    if sharding is None:
        return leaf
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda part: _abstract(part, part_sharding(part.shape, sharding)), leaf)
    return jax.tree.map(_abstract, leaf, sharding)


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _check_recipe(checkpoint: Path, config: RunConfig) -> None:
    """Checks that a checkpoint was quantized with the recipe of the run's config.

    It compares only sections that both configs have. A config without a recipe requests the float model, which a run
    trained with a recipe also has.

    Args:
      checkpoint: directory of the checkpoint. Nothing is compared if it is damaged, which its reader reports.

    Raises:
      ConfigError: the recipes differ; names each setting.
    """
    try:
        text = read_documents(checkpoint, read_manifest(checkpoint))[CONFIG].decode()
    except CheckpointError:
        return
    path = checkpoint / CONFIG
    saved = parse_yaml(text, str(path))
    lines = [
        line
        for name in registries.transforms
        if name in saved and name in config.sections
        for line in differences(
            to_mapping(config.sections[name]), to_mapping(parse(registries.sections[name], saved[name])), name
        )
    ]
    if lines:
        listing = "\n  ".join(lines)
        raise ConfigError(
            f"Checkpoint {checkpoint} was quantized by another recipe; here is the run's, not the checkpoint's:\n  "
            f"{listing}\nRestore the run's config, of which the checkpoint has a copy: {path}."
        )
