"""Loading of a model's parameters from the newest intact checkpoint of a run."""

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
from stack_core.abi.local_paths import local_path
from stack_core.abi.mesh import in_mesh
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.abi.tree_paths import path_name
from stack_train.checkpoint import CheckpointStore, FrozenRecord
from stack_train.optim.optax_optimizer import as_optimizer
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_params, stored_model
from stack_train.run.program import build_program
from stack_train.run.start import open_published, published_format
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

__all__ = ["first_state", "load_model", "load_params", "load_start", "on_one_device", "with_frozen"]


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
    model = ModelVariables.of(stored_model(config))
    shapes = flatten_mapping(model.abstract)
    if shardings is not None:
        places = flatten_mapping(shardings)
    elif in_mesh.value is not None:
        mesh, rules = in_mesh.value
        places = variable_shardings(shapes, {path: model.axes[path] for path in shapes}, rules, mesh)
    else:
        places: dict[Any, Any] = {}
    variables, step = _restored(run, config, shapes, places)
    return model.merge(variables), step


def load_params(run: Path, config: Any, shardings: Tree | None = None) -> Tree:
    """Loads the variables of a run's model onto their shardings, cast to the dtypes that `config` has.

    Adapters are merged; quantized parameters are dequantized, and what a quantizer keeps beside them is dropped.

    Args:
      config: of the model; its `param_dtype` may differ from the run's.
      shardings: of the variables; None puts all on the default device.

    Raises:
      RunDirectoryError: there is no run.
      ConfigError: its checkpoint was quantized by another recipe than its config has.
      CheckpointError: no checkpoint can be used, or its model is another; names each parameter that differs.
    """
    return load_start(run, config, shardings)[0]


def load_start(
    run: Path,
    config: Any,
    shardings: Tree | None = None,
    *,
    step: int | None = None,
    dtypes: Mapping[_Path, Any] | None = None,
) -> tuple[Tree, int]:
    """As `load_params`, with the step of the checkpoint that was read.

    Args:
      step: of the checkpoint to read; None is the newest that is intact.
      dtypes: of the variables that are to have another dtype than `config` gives them, by path.
    """
    saved, dtypes = run_config(run), dtypes or {}
    stored = replace(saved, model=replace(config, param_dtype=saved.model.param_dtype))
    model, transform = ModelVariables.of(stored_model(stored)), transform_of(stored)
    # The run's checkpoint may hold float32 values of parameters that `config` publishes in bfloat16.
    shapes = flatten_mapping(cast_values(model.abstract, dtypes))
    # What is merged is read where all of it fits together, and put onto the shardings after.
    places = {} if shardings is None or transform.merges else flatten_mapping(shardings)
    restored, step = _restored(run, saved, shapes, places, step)
    values = values_of(transform.merged(model.merge(restored))) if transform.merges else flatten_mapping(restored)
    wanted = flatten_mapping(cast_values(abstract_params(config), dtypes))
    params = unflatten_mapping(
        {path: ops.dequantize(values[path], leaf.dtype).astype(leaf.dtype) for path, leaf in wanted.items()}
    )
    return (params if shardings is None else jax.device_put(params, shardings)), step


def _load_init(program: Program, config: RunConfig, source: str, step: int | None = None) -> tuple[Tree, int]:
    """Loads the values that a run starts from, in the dtypes and shardings of its program.

    Args:
      source: "run:DIR" or "FORMAT:DIR".
    """
    variables = flatten_mapping(program.initial_variables)
    scheme, _, directory = source.partition(":")
    if scheme != "run":
        return _load_published(source, variables), 0
    shardings = unflatten_mapping({path: leaf.sharding for path, leaf in variables.items()})
    dtypes = {path: leaf.dtype for path, leaf in variables.items()}
    return load_start(Path(directory), config.model, shardings, step=step, dtypes=dtypes)


def _load_published(source: str, variables: Mapping[_Path, Any]) -> Tree:
    """Reads the variables from a checkpoint of another format, "FORMAT:DIR", one by one.

    Raises:
      CheckpointError: it has other parameters.
    """
    published = open_published(source)
    assert published is not None, "checked before the run starts"
    paths, values = {path_name(path): path for path in variables}, dict[_Path, jax.Array]()
    for name, leaf in published.leaves():
        like = variables.get(paths.get(name, ()))
        if like is None or like.shape != leaf.shape:
            here = "has none of this name" if like is None else f"expects {like.shape}"
            raise CheckpointError(f"Parameter {name!r} of {source} has shape {leaf.shape}; the run's model {here}.")
        values[paths[name]] = jax.device_put(leaf.astype(like.dtype), like.sharding)
    if missing := [name for name, path in paths.items() if path not in values]:
        raise CheckpointError(f"{source} lacks parameters of the run's model: {', '.join(missing)}.")
    return unflatten_mapping(values)


def first_state(program: Program, config: RunConfig) -> tuple[TrainState, dict[str, FrozenRecord]]:
    """Returns the state before the first step and the sources of frozen variables by model name."""
    given: Tree = {}
    source, step = INIT, 0
    if config.run.init_from is not None:
        source = _absolute(config.run.init_from)
        given, step = _load_init(program, config, source)
    loaded = {name: _load_auxiliary(program, name) for name in program.saved_auxiliary}
    auxiliary = {name: variables for name, (variables, _) in loaded.items()}
    state = program.init(given, key=jax.random.key(config.run.seed), auxiliary=auxiliary)
    records = {}
    copies = {name: each.params for name, each in state.auxiliary.items() if each.opt_state is None}
    for name, variables in {"model": state.frozen, **copies}.items():
        address = f"run:{_saved_run(program, name)}" if name in loaded else source
        if jax.tree.leaves(variables):
            records[name] = FrozenRecord.of(variables, source=address, step=loaded[name][1] if name in loaded else step)
    return state, records


def with_frozen(
    state: TrainState, program: Program, config: RunConfig, records: Mapping[str, FrozenRecord]
) -> TrainState:
    """A state that was restored, with what its checkpoint does not hold made or read again.

    Raises:
      CheckpointError: a source holds others now; names each variable.
    """
    frozen, auxiliary = _frozen(program, config, records)
    for name in program.saved_auxiliary:
        auxiliary[name], _ = _load_auxiliary(program, name, records[name].step)
    for name, variables in {"model": frozen, **auxiliary}.items():
        if name in records:
            records[name].check(variables)
    copies = {name: AuxiliaryState(variables) for name, variables in auxiliary.items()}
    return replace(state, frozen=frozen, auxiliary={**state.auxiliary, **copies})


def _frozen(program: Program, config: RunConfig, records: Mapping[str, FrozenRecord]) -> tuple[Tree, dict[str, Tree]]:
    """Initializes the frozen variables of a run's model, and the copies of the initial model by name."""
    made = {"model", *program.step.auxiliary}.difference(program.saved_auxiliary)
    own = [record for name, record in records.items() if name in made]
    if not own:
        return {}, {}
    given: Tree = {}
    if own[0].source != INIT:
        given, _ = _load_init(program, config, own[0].source, own[0].step)
    frozen, copies = program.init_frozen(given, key=jax.random.key(config.run.seed))
    return frozen, {name: each.params for name, each in copies.items()}


def _absolute(source: str) -> str:
    """Returns the address of `run.init_from` for a checkpoint: the format, "run" for a run, and the absolute path."""
    if published_format(source) is None:
        return f"run:{Path(source).absolute()}"
    scheme, _, directory = source.partition(":")
    return f"{scheme}:{Path(directory).absolute()}"


def _load_auxiliary(program: Program, name: str, step: int | None = None) -> tuple[Tree, int]:
    """Loads the variables of an auxiliary model from another run, and returns them and the step of its checkpoint."""
    run = _saved_run(program, name)
    shapes = flatten_mapping(program.step.auxiliary[name].variables.abstract)
    places = flatten_mapping(program.state_shardings.auxiliary[name].params)
    return _restored(run, run_config(run), shapes, places, step)


def _saved_run(program: Program, name: str) -> Path:
    """Returns the directory of the run that a frozen auxiliary model is loaded from."""
    return local_path(program.step.auxiliary[name].source.removeprefix("run:")).absolute()


def _restored(
    run: Path, config: RunConfig, shapes: Mapping[_Path, Any], places: Mapping[_Path, Any], step: int | None = None
) -> tuple[Tree, int]:
    """The variables of a run's model: averages where its optimizer keeps them, frozen ones from their source."""
    abstract = unflatten_mapping({path: _placed(leaf, places.get(path)) for path, leaf in shapes.items()})
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        latest = store.latest() if step is None else step
        if latest is not None:
            _check_recipe(store.path(latest) / "config.yaml", config)
        restored = store.restore_variables(abstract, step)
        averages = as_optimizer(config.optimizer).averages and restored.kind != "weights"
        if not (averages or "model" in restored.frozen):
            return restored.state, restored.step
        program = on_one_device(config)
        variables = flatten_mapping(restored.state)
        if "model" in restored.frozen:
            frozen, _ = _frozen(program, config, restored.frozen)
            restored.frozen["model"].check(frozen)
            variables |= flatten_mapping(frozen)
        if averages:
            state = program.abstract_state
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.opt_state)
            opt_state = store.restore_params(shapes, restored.step, under="opt_state").state
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params)
            params = store.restore_params(shapes, restored.step).state  # as they were trained, not cast
            with jax.numpy_dtype_promotion("standard"):
                averaged = as_optimizer(config.optimizer).evaluation_params(params, opt_state)
            variables |= flatten_mapping(averaged)
    tree = cast_values(
        unflatten_mapping(variables), {path: leaf.dtype for path, leaf in flatten_mapping(abstract).items()}
    )
    return (jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, abstract)) if places else tree), restored.step


def on_one_device(config: RunConfig) -> Program:
    """The program of a run, for its initial values and the shapes of its optimizer's state."""
    sizes: dict[str, Any] = dict.fromkeys(config.mesh.sizes, 1)
    mesh = replace(config.mesh, **sizes)
    return build_program(replace(config, mesh=mesh), jax.local_devices()[:1], with_saved=False)


def _placed(leaf: Any, sharding: Any) -> Any:
    """The abstract array with its place; each part of a quantized one goes where the entries go that it is of."""
    if sharding is None:
        return leaf
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda part: _abstract(part, part_sharding(part.shape, sharding)), leaf)
    return jax.tree.map(_abstract, leaf, sharding)


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _check_recipe(path: Path, config: RunConfig) -> None:
    """Raises where a checkpoint's config, if it is there to be read, has another recipe than the run's.

    A config without a recipe asks for a float model, which a run that trains by a recipe has, too.
    """
    saved = parse_yaml(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}
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
            f"Checkpoint {path.parent} was quantized by another recipe; here is the run's, not the checkpoint's:\n  "
            f"{listing}\nRestore the run's config, of which the checkpoint has a copy: {path}."
        )
