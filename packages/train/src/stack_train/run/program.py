"""The program of a run and its step traced for the run's batch shapes; nothing is allocated."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from stack_core.abi.errors import ConfigError, ShardingError, nearest
from stack_core.abi.local_paths import local_path
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.objectives import Objective
from stack_core.abi.plugins import registries
from stack_core.chips.device_mesh import make_mesh
from stack_core.programs.flops import Flops, model_flops_per_step
from stack_train.nn.schedules import Schedule, schedule
from stack_train.objectives import as_objective
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import holds_codes, stored_model
from stack_train.run.transforms import transform_names, transform_of
from stack_train.step.auxiliary import AVERAGE, INIT
from stack_train.step.program import Program
from stack_train.step.replicas import REPLICA
from stack_train.step.staged import is_in_layers
from stack_train.step.step import Step, make_step
from stack_train.variables.model_variables import sharding_rules

__all__ = ["build_program", "model_flops", "naming_sizes", "on_one_device", "single_device_program", "traced_step"]

# Config keys that set the sizes of logical axes with other names, or with several keys.
_SIZES = {
    "batch": ("data.batch_size", "run.accumulation_steps"),
    "seq": ("data.seq_tokens",),
    "heads": ("model.heads", "model.mamba_heads", "model.value_heads"),
    "kv_heads": ("model.kv_heads", "model.global_kv_heads", "model.mamba_groups", "model.key_heads"),
    "mlp": ("model.mlp", "model.expert_mlp", "model.shared_mlp"),
}


def build_program(
    config: RunConfig, devices: Sequence[jax.Device] | None = None, *, with_saved: bool = True
) -> Program:
    """Builds the program of a run.

    Args:
      devices: devices of the mesh; None uses all local and remote devices.
      with_saved: if False, auxiliary models of other runs need not exist, and the program can only initialize and
        describe states.

    Raises:
      ShardingError: the mesh sizes do not multiply to the number of devices.
      ConfigError: the transforms leave no trainable parameters, or a mesh axis would not divide any work.
    """
    names = transform_names(config)
    if len(names) == 1 and holds_codes(config):  # a second transform, such as LoRA, would add trainable parameters
        raise ConfigError(
            f"The recipe in section {names[0]} turns parameters into codes, which no optimizer can update. Train by a "
            "method that keeps them in float, as method: qat of stack-quant does, and quantize what comes out of it."
        )
    if "controlnet" in names and len(names) > 1:
        others = ", ".join(name for name in names if name != "controlnet")
        raise ConfigError(f"Section controlnet trains no other part of the model; leave the sections {others} out.")
    mesh = make_mesh(config.mesh, devices)
    objective = as_objective(config.objective.build())
    _check_busy(config, mesh, objective)
    for name, source in objective.auxiliary_models.items():
        _check_source(name, source)
    step = make_step(
        config.model,
        objective,
        config.optimizer,
        steps=config.run.steps,
        precision=config.precision,
        accumulation_steps=config.run.accumulation_steps,
        transform=transform_of(config),
        schedule=_schedule(config, mesh),
        open_model=lambda source: stored_model(_run_of(source)),
    )
    _check_indexer(config, step)
    if not with_saved:
        # Omits models of other runs, which need not exist here.
        kept = {name: each for name, each in step.auxiliary.items() if each.source in ("", INIT)}
        step = dataclasses.replace(step, auxiliary=kept)
    program = Program(step, mesh, config.mesh.rules)
    if step.schedule is not None:
        _check_staged(config, program)
    return program


def single_device_program(config: RunConfig) -> Program:
    """Builds a run's program on one device, for its initial values and the shapes of its optimizer's state."""
    return build_program(on_one_device(config), jax.local_devices()[:1], with_saved=False)


def on_one_device(config: RunConfig) -> RunConfig:
    """Returns the config of a run for one device, without replicas that train apart."""
    optimizer = config.optimizer
    if getattr(optimizer, "outer", None) is not None and optimizer.outer.replicas > 1:
        # Replicas refuse averages, so readers need only the parameters of the last outer step.
        optimizer = dataclasses.replace(optimizer, outer=None)
    return dataclasses.replace(config, mesh=MeshConfig(fsdp=1, rules=config.mesh.rules), optimizer=optimizer)


def _check_busy(config: RunConfig, mesh: Mesh, objective: Objective) -> None:
    """Raises a ConfigError if the devices of a mesh axis would repeat each other's work."""
    idle = {}
    rules = sharding_rules(registries.models[config.model.name], config.mesh.rules)
    if not any("seq" in axes.split() for axes in objective.inputs.values()):
        idle["context"] = "the objective reads no sequences; use mesh.data or mesh.fsdp"
    elif "context" not in rules.mesh_axes("seq"):
        idle["context"] = "mesh.rules.seq does not name it; set mesh.rules.seq=context"
    if "stage" not in rules.mesh_axes("layers"):
        idle["stage"] = "mesh.rules.layers does not name it; set mesh.rules.layers=stage"
    for axis, advice in idle.items():
        if (size := mesh.shape[axis]) > 1:
            raise ConfigError(f"mesh.{axis} is {size}, but its devices would divide no work: {advice}.")


def _check_indexer(config: RunConfig, step: Step) -> None:
    """Raises a ConfigError if a run has a trained indexer without its loss, or only frozen indexers."""
    training = getattr(config.model, "index_training", "frozen")
    if training == "frozen":
        return
    if not getattr(config.objective, "index_loss", 0.0):
        raise ConfigError(
            f"model.index_training={training} trains indexers by a loss of their own, which the objective "
            f"{config.objective.name!r} does not add. Set objective.index_loss of causal_lm, or index_training=frozen."
        )
    if not any("indexer" in path for path in step.model.variables.paths("trained")):
        raise ConfigError(
            f"model.index_training={training}, but optimizer.groups or a section such as lora freezes all indexers. "
            "Leave out their paths, attention/indexer, or set index_training=frozen."
        )


def _schedule(config: RunConfig, mesh: Mesh) -> Schedule | None:
    stages, pipeline = mesh.shape["stage"], config.run.pipeline
    if stages == 1:
        return None
    return schedule(pipeline.schedule, stages=stages, microbatches=pipeline.microbatches, chunks=pipeline.chunks)


def _run_of(source: str) -> RunConfig:
    """Returns the config of the run of a source "run:DIRECTORY"."""
    return run_config(local_path(source.removeprefix("run:")))


def _check_staged(config: RunConfig, program: Program) -> None:
    """Raises a ConfigError if a run uses a feature that pipeline stages do not support."""
    size, microbatches = program.mesh.shape["stage"], config.run.pipeline.microbatches
    sources = {name: each.source for name, each in program.step.auxiliary.items() if each.source not in ("", INIT)}
    transformed = [name for name, source in sources.items() if transform_names(_run_of(source))]
    axes = program.step.model.variables.logical_axes
    stacked = [each for each in jax.tree.leaves(axes, is_leaf=_is_axes) if is_in_layers(each)]
    problems = {
        "its devices would divide no work: the model has no parameters stacked over layers": not stacked,
        f"sections transform the objective's model {', '.join(transformed)}": bool(transformed),
        "the microbatches of run.pipeline take the place of run.accumulation_steps, which is more than 1": (
            config.run.accumulation_steps > 1
        ),
        # XLA's partitioner fails on their lookups with a third axis ("Check failed: num_replica_groups", jax 0.10.2).
        "the model has mixtures of experts or multi-token prediction, which take mesh.context and no other axis": (
            program.mesh.shape["context"] > 1
            and program.mesh.size > size * program.mesh.shape["context"]
            and (
                "further" in program.step.model.module_names
                or any("experts" in each for each in jax.tree.leaves(axes, is_leaf=_is_axes))
            )
        ),
        f"run.pipeline.microbatches={microbatches} does not divide the batch": any(
            shape.shape[0] % microbatches for shape in config.batches.spec(config.model).values()
        ),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise ConfigError(f"mesh.stage is {size}, but {'; and '.join(found)}. Set mesh.stage=1, or change that.")


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _check_source(name: str, source: Any) -> None:
    """Raises a ConfigError if the source of a frozen auxiliary model is none of "init", "average", "run:DIRECTORY"."""
    is_run = isinstance(source, str) and source.startswith("run:") and source != "run:"
    if isinstance(source, str) and source not in (INIT, AVERAGE) and not is_run:
        raise ConfigError(
            f"The objective's model {name!r} comes from {source!r}; expected 'init', the model before the first step, "
            "'average', its averaged weights, or 'run:DIRECTORY'."
        )


def traced_step(config: RunConfig, program: Program) -> jax.stages.Traced:
    """Traces the train step, ready for `.lower().compile()`.

    Raises:
      ConfigError: a mesh rule names a logical axis that no array has.
      ShardingError: the mesh does not divide an array; names the config keys that set the sizes.
    """
    by_rule = sharding_rules(registries.models[config.model.name], {})
    known = {name for name, _ in by_rule.table} | set(jax.tree.leaves(program.step.model.variables.logical_axes))
    for name in config.mesh.rules:
        if name not in known:
            raise ConfigError(
                f"mesh.rules.{name} is for a logical axis that no array has.{nearest(name, known)} "
                f"There are: {', '.join(sorted(known))}."
            )
    with naming_sizes(config):
        return program.trace(config.batches.spec(config.model))


def model_flops(config: RunConfig, program: Program) -> Flops:
    """Counts the FLOPs that a step needs, independently of the mesh.

    The count is for one device, where each row visits its experts once. On a mesh, experts compute full buffers with
    padding rows, which the model does not need.
    """
    if program.mesh.size > 1:
        program = build_program(on_one_device(config), program.mesh.devices.flatten()[:1].tolist())
    auxiliary = {name: each.params for name, each in program.abstract_state.auxiliary.items()}
    evaluate = program.on_mesh(program.step.evaluate)
    return model_flops_per_step(evaluate, program.abstract_variables, config.batches.spec(config.model), auxiliary)


@contextlib.contextmanager
def naming_sizes(config: RunConfig) -> Iterator[None]:
    """Adds the config keys that set the sizes to the message of a ShardingError."""
    try:
        yield
    except ShardingError as error:
        keys = {key: None for axis in error.logical_axes for key in _size_keys(config, axis)}
        if not keys:
            raise
        sizes = f"Sizes come from {', '.join(keys)}."
        if f"mesh.{REPLICA}" in str(error):
            sizes += f" mesh.{REPLICA} is optimizer.outer.replicas, and mesh.data the devices of a replica."
        raise ShardingError(f"{error}\n{sizes}", logical_axes=error.logical_axes) from error


def _size_keys(config: RunConfig, logical_axis: str) -> list[str]:
    """Lists the config keys that set the size of a logical axis, as "key=value"."""
    axis = logical_axis.removeprefix("act_").removeprefix("norm_").removeprefix("lookup_")
    # Families name sizes after the axis, some with a suffix, as in vocab_size.
    keys = _SIZES.get(axis, (f"model.{axis}", f"model.{axis}_size"))
    sections = [(key, *key.split(".")) for key in keys]
    return [
        f"{key}={getattr(getattr(config, section), name)}"
        for key, section, name in sections
        if hasattr(getattr(config, section), name)
    ]
