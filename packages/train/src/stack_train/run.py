"""A training run from its config: everything that can be refused is refused before a byte is written."""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from stack_core.config import differences, parse_yaml, to_mapping, to_yaml
from stack_core.errors import ConfigError, ShardingError, nearest
from stack_core.event_bus import EventBus, ObserverContext, observers_from
from stack_core.events import RunFailed, RunStarted
from stack_core.hardware import count_units, current_chip, model_flops_per_step
from stack_core.mesh import DEFAULT_RULES, ShardingRules, check_shardings, make_mesh
from stack_core.plugins import registries
from stack_train.checkpoint import CheckpointStore
from stack_train.config import RunConfig
from stack_train.data.config import BPE
from stack_train.data.pipeline import Pipeline, TrainIterator, build_pipeline
from stack_train.loop import RunSummary, TrainingLoop
from stack_train.quantization import quantizer_name, recipe_differences, transform_of
from stack_train.run_directory import RunDirectory
from stack_train.signals import stop_requests
from stack_train.step import LanguageModelTrainer, TrainState, batch_shapes
from stack_train.weights import holds_codes, load_params, run_config

__all__ = ["build_trainer", "traced_step", "train"]

# What a run learns may not change when it is resumed; how long it goes on, where it lies and what it writes may.
_FIXED = ("model", "data", "objective", "optimizer", "trainer.accumulation_steps", "trainer.seed")
_FREE = ("data.prefetch_batches", "model.remat", "model.unroll")
# Where the sizes of logical axes are set that are no fields of a model's config.
_SIZES = {"batch": ("data.batch_size", "trainer.accumulation_steps"), "seq": ("data.seq_tokens",)}


def train(config: RunConfig, *, resume: bool = False, terminal: bool = False) -> RunSummary:
    """Trains a model as `config` says and returns how the run ended.

    Args:
      resume: go on from the newest whole checkpoint, or from the start where a killed run had none yet.
      terminal: draw progress bars.

    Raises:
      StackError: the config, the data, the directory or a checkpoint does not fit; or training cannot go on.
    """
    config = _with_one_vocabulary(config)
    directory = RunDirectory(Path(config.output))
    directory.check(resume=resume)
    _check_recipe(config)
    if resume:
        _check_same_run(config, directory)
    trainer = build_trainer(config)
    step = traced_step(config, trainer)
    pipeline = build_pipeline(config.data, seed=config.trainer.seed)
    _check_vocabulary(config, pipeline)
    with directory.open(resume=resume), _observed(config, directory, terminal=terminal) as bus:
        directory.write(to_yaml(config), pipeline.tokenizer)
        with CheckpointStore(directory.checkpoints, config.checkpoint, emit=bus.emit) as store:
            return _run(config, directory, pipeline, trainer, step, store, bus)


def _run(
    config: RunConfig,
    directory: RunDirectory,
    pipeline: Pipeline,
    trainer: LanguageModelTrainer,
    step: jax.stages.Traced,
    store: CheckpointStore,
    bus: EventBus,
) -> RunSummary:
    batches = pipeline.train_iterator()
    state, first_step = _first_state(config, trainer, store, batches)
    started_s = time.perf_counter()
    compiled = step.lower().compile()
    compile_s = time.perf_counter() - started_s
    flops, ideal_step_s = _cost(trainer, batch_shapes(config.data.batch_size, config.data.seq_tokens))
    loop = TrainingLoop(
        config=config,
        trainer=trainer,
        compiled=compiled,
        pipeline=pipeline,
        store=store,
        bus=bus,
        directory=directory.path,
        config_yaml=to_yaml(config),
        ideal_step_s=ideal_step_s,
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.abstract_params))
    tokens_per_step = config.data.batch_size * config.data.seq_tokens
    steps = config.trainer.steps
    bus.emit(RunStarted(first_step, steps, parameters, tokens_per_step, flops, ideal_step_s, compile_s, directory.path))
    with stop_requests() as stop:
        return loop.run(state, batches, first_step, stop)


def _with_one_vocabulary(config: RunConfig) -> RunConfig:
    """A BPE that is trained for the run has as many tokens as the model, unless `data.vocab_size` says otherwise."""
    if config.data.tokenizer != BPE or config.data.vocab_size is not None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, vocab_size=config.model.vocab_size))


def _check_same_run(config: RunConfig, directory: RunDirectory) -> None:
    saved = parse_yaml(directory.config_yaml(), str(directory.config))
    changed = [
        line
        for line in differences(to_mapping(config), saved)
        if line.startswith((*_FIXED, *registries.quantizers.names())) and not line.startswith(_FREE)
    ]
    if changed:
        listing = "\n  ".join(changed)
        raise ConfigError(
            f"This config is not that of the run in {directory.path}:\n  {listing}\n"
            "Restore these values to resume, or give the new run an output of its own and trainer.init_from."
        )


def _check_recipe(config: RunConfig) -> None:
    """Raises where the model that a run starts from is quantized by another recipe, warns where the run has none."""
    source = config.trainer.init_from
    if source is None or source.startswith("hf:"):
        return
    saved = run_config(Path(source))
    name = quantizer_name(saved)
    if name is not None and quantizer_name(config) is None:
        warnings.warn(
            f"The model of {source} is quantized. This run starts from the floats that its parameters stand for, and "
            f"quantizes nothing itself: its config has no section {name}.",
            stacklevel=3,
        )
    elif name is not None and (lines := recipe_differences(config, saved)):
        listing = "\n  ".join(lines)
        raise ConfigError(
            f"The model of {source} is quantized by another recipe; here is this run's, not that one's:\n  {listing}\n"
            "Start from the run that it was quantized from, or use the same recipe."
        )


def build_trainer(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> LanguageModelTrainer:
    """The trainer of a run, on all of `devices`, by default those that are there; nothing is allocated.

    Raises:
      ShardingError: the sizes of the mesh do not multiply to the number of devices.
      ConfigError: the recipe of the run leaves nothing to train.
    """
    if (name := quantizer_name(config)) is not None and holds_codes(config):
        raise ConfigError(
            f"The recipe in section {name} turns parameters into codes, which no optimizer can update. Train by a "
            "method that keeps them in float, as method: qat of stack-quant does, and quantize what comes out of it."
        )
    return LanguageModelTrainer(
        family=registries.models[config.model.family],
        model_config=config.model,
        objective=config.objective.build(),
        optimizer=config.optimizer,
        steps=config.trainer.steps,
        mesh=make_mesh(config.mesh, devices),
        accumulation_steps=config.trainer.accumulation_steps,
        rules=ShardingRules(config.mesh.rules),
        transform=transform_of(config),
    )


def _check_vocabulary(config: RunConfig, pipeline: Pipeline) -> None:
    if pipeline.tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {pipeline.tokenizer.vocab_size} tokens, but model.vocab_size is "
            f"{config.model.vocab_size}. Set model.vocab_size to {pipeline.tokenizer.vocab_size} or more."
        )


def _check_sizes(config: RunConfig) -> None:
    """Raises where sections of the config contradict each other."""
    if config.trainer.init_from and config.trainer.init_from.startswith("hf:"):
        source = config.trainer.init_from
        raise ConfigError(f"trainer.init_from takes a run directory. Convert first: stack convert {source} RUN.")
    if config.data.seq_tokens > config.model.max_positions:
        raise ConfigError(
            f"data.seq_tokens is {config.data.seq_tokens}, but model.max_positions is {config.model.max_positions}. "
            "Raise the one or lower the other."
        )
    if config.data.batch_size % config.trainer.accumulation_steps:
        raise ConfigError(
            f"data.batch_size {config.data.batch_size} is not a multiple of trainer.accumulation_steps "
            f"{config.trainer.accumulation_steps}."
        )


def traced_step(config: RunConfig, trainer: LanguageModelTrainer) -> jax.stages.Traced:
    """The step, for `.lower().compile()`; nothing is allocated.

    Raises:
      ConfigError: model and batch contradict each other, or a rule is for a logical axis that no array has.
      ShardingError: the mesh does not divide an array; names the keys of the config that set the sizes.
    """
    _check_sizes(config)
    known = {name for name, _ in DEFAULT_RULES.table} | set(jax.tree.leaves(trainer.logical_axes))
    for name in config.mesh.rules:
        if name not in known:
            raise ConfigError(
                f"mesh.rules.{name} is for a logical axis that no array has.{nearest(name, known)} "
                f"There are: {', '.join(sorted(known))}."
            )
    try:
        return trainer.trace(batch_shapes(config.data.batch_size, config.data.seq_tokens))
    except ShardingError as error:
        keys = {key: None for axis in error.logical_axes for key in _size_keys(config, axis)}
        if not keys:
            raise
        raise ShardingError(f"{error}\nSizes come from {', '.join(keys)}.", logical_axes=error.logical_axes) from error


def _size_keys(config: RunConfig, logical_axis: str) -> list[str]:
    """What in the config sets the size of a logical axis, as "key=value"."""
    axis = logical_axis.removeprefix("act_").removeprefix("norm_").removeprefix("lookup_")
    keys = _SIZES.get(axis, (f"model.{axis}", f"model.{axis}_size"))
    sections = [(key, *key.split(".")) for key in keys]
    return [
        f"{key}={getattr(getattr(config, section), name)}"
        for key, section, name in sections
        if hasattr(getattr(config, section), name)
    ]


def _first_state(
    config: RunConfig, trainer: LanguageModelTrainer, store: CheckpointStore, batches: TrainIterator
) -> tuple[TrainState, int]:
    """The state to start from and the steps it has behind it; `batches` is moved there too."""
    steps = 0
    key = jax.random.key(config.trainer.seed)
    if store.latest() is not None:
        restored = store.restore(trainer.abstract_state)
        batches.set_state(restored.data_state)
        state, steps = restored.state, restored.step
    elif config.trainer.init_from is None:
        state = trainer.init(key=key)
    else:
        params = load_params(Path(config.trainer.init_from), config.model, trainer.state_shardings.params)
        state = trainer.init_from(params, key=key)
    check_shardings(state, trainer.state_shardings)
    return state, steps


def _cost(trainer: LanguageModelTrainer, shapes: Mapping[str, Any]) -> tuple[int, float | None]:
    """The model's FLOPs of one step, and how long they take at the peak of all chips, where that is known."""
    flops = model_flops_per_step(trainer.evaluate, trainer.abstract_params, shapes)
    chip = current_chip()
    return flops.total, flops.ideal_s(chip, units=count_units(chip, trainer.mesh.devices.flatten().tolist()))


@contextlib.contextmanager
def _observed(config: RunConfig, directory: RunDirectory, *, terminal: bool) -> Iterator[EventBus]:
    """The bus of all registered observers; tells them when the run fails."""
    context = ObserverContext(directory.path, config, terminal)
    with EventBus(observers_from(registries.observers, context)) as bus:
        try:
            yield bus
        except BaseException as error:  # Observers learn of every end, Ctrl-C's included; it goes on unchanged.
            bus.emit(RunFailed(error))
            raise
