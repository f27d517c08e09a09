"""A run as its config makes it: everything that can be refused is refused before a byte is written."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from stack_core import ops
from stack_core.abi.config import differences, dotted_keys, is_under, parse_yaml, to_mapping
from stack_core.abi.data import Batches
from stack_core.abi.errors import ConfigError, PluginError, nearest
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.processes import ALONE, Processes, join
from stack_train.run.checks import check_run, check_start
from stack_train.run.config import RunConfig
from stack_train.run.memory import check_state
from stack_train.run.placing import own_rows
from stack_train.run.program import build_trainer, naming_sizes, traced_step
from stack_train.run.source_files import changed_files
from stack_train.run.start import data_of_resumed, with_tokenizer_of_start
from stack_train.trainer import Trainer
from stack_train.variables import sharding_rules

__all__ = ["Run", "build", "fixed_differences"]

# What a run learns may not change when it is resumed; how long it goes on, where it lies and what it writes may.
_FIXED = ("model", "data", "objective", "optimizer", "precision", "run.accumulation_steps", "run.seed")
_FREE = ("data.prefetch_batches", "model.remat", "model.unroll")


def build(config: RunConfig, *, resume: bool = False, allow: Sequence[str] = ()) -> "Run":
    """Makes all that a run needs, and writes nothing.

    Args:
      resume: the directory holds the run, which is to go on.
      allow: keys that may differ from those of the run that goes on, or of the one that this one starts from.

    Raises:
      StackError: the config, the data, the directory or the devices' memory does not fit.
    """
    began_s = time.perf_counter()
    processes = join(config.processes)
    with processes.ending_together():
        return replace(_built(config, resume, tuple(allow), processes), began_s=began_s)


def _built(config: RunConfig, resume: bool, allowed: tuple[str, ...], processes: Processes) -> "Run":
    mapping = to_mapping(replace(config, processes=replace(config.processes, id=None)))
    processes.check_alike("config", mapping | {"--resume": resume, "--allow": list(allowed)})
    config = _with_all_rules(with_tokenizer_of_start(config))
    directory = RunDirectory(Path(config.output))
    if processes.first:
        directory.check(resume=resume)
    _check_allowed(config, directory, resume, allowed)
    check_start(config, allowed)
    changes = _changes(config, directory, allowed) if resume else ()
    check_run(config)
    trainer = build_trainer(config)
    with naming_sizes(config):
        check_state(trainer)
    step = traced_step(config, trainer)
    # In turn, so that one alone trains a tokenizer and tokenizes; the others find that in the cache.
    kind = data_of_resumed(config) if resume else config.data
    data = processes.in_turn("data", lambda: kind.build(seed=config.run.seed, model=config.model))
    rows = None
    if not isinstance(data, Batches):
        raise PluginError(
            f"data.kind {config.data.kind!r} built a {type(data).__name__}; expected a stack_core.abi.data.Batches."
        )
    if processes.count > 1:
        own = own_rows(trainer, config.data.spec(config.model))
        if (of_process := data.with_rows(own)) is not None:
            data, rows = of_process, own
    return Run(config, directory, trainer, step, data, resume, changes, processes, rows, ops.choices())


@dataclass(frozen=True)
class Run:
    """A run that may start; `stack_train.run.train` starts it.

    Attributes:
      step: traced; nothing is allocated.
      resume: go on from the newest checkpoint in the directory.
      changes: in what the config differs from the one that it was run with before, "optimizer.learning_rate: ...".
      processes: that do the run together.
      rows: of the training batches that `data` makes; None makes them whole.
      choices: `ops.choices()`, which implementations the step got.
      began_s: when it was asked for, by `time.perf_counter`.
    """

    config: RunConfig
    directory: RunDirectory
    trainer: Trainer
    step: jax.stages.Traced
    data: Batches
    resume: bool = False
    changes: tuple[str, ...] = ()
    processes: Processes = ALONE
    rows: Int64[np.ndarray, " own"] | None = None
    choices: Sequence[Mapping[str, Any]] = ()
    began_s: float = field(default_factory=time.perf_counter)


def _with_all_rules(config: RunConfig) -> RunConfig:
    """Adds the mesh rules of the model family and the defaults, so that the config file of the run lists all rules."""
    rules = sharding_rules(registries.models[config.model.family], config.mesh.rules)
    return replace(config, mesh=replace(config.mesh, rules=dict(rules.table)))


def _check_allowed(config: RunConfig, directory: RunDirectory, resume: bool, allowed: tuple[str, ...]) -> None:
    """Raises a ConfigError if `--allow` cannot act: there is nothing to differ from, or a key does not exist."""
    if not allowed:
        return
    if not resume and config.run.init_from is None:
        raise ConfigError(
            f"--allow {allowed[0]} has nothing to differ from: this run starts from no other. Leave it out, or give "
            "--resume or run.init_from."
        )
    keys = dotted_keys(to_mapping(config))
    if resume:
        keys |= dotted_keys(parse_yaml(directory.config_yaml(), str(directory.config)))
    for key in allowed:
        if key not in keys:
            raise ConfigError(
                f"--allow {key}: the config has no such key.{nearest(key, keys)} Give a whole key or section, such as "
                "optimizer.learning_rate or data."
            )


def fixed_differences(config: RunConfig, saved: Mapping[str, Any]) -> list[str]:
    """Lists differences from a saved config in keys that training depends on, such as "data.batch_size: 4, not 8"."""
    # Configs without the section are of runs that trained parameters in the dtype that they are published in.
    precision = {"params": saved.get("model", {}).get("param_dtype", "float32")}
    lines = differences(to_mapping(config), {"precision": precision, **saved})
    fixed = (*_FIXED, *registries.transforms.names())
    return [line for line in lines if is_under(line, fixed) and not is_under(line, _FREE)]


def _changes(config: RunConfig, directory: RunDirectory, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Lists the changed config keys and data files that affect what a resumed run learns.

    Raises:
      ConfigError: a key changed that `allowed` does not list.
    """
    saved = parse_yaml(directory.config_yaml(), str(directory.config))
    found = fixed_differences(config, saved)
    if getattr(config.data, "source", None) == saved.get("data", {}).get("source"):
        found += changed_files(config.data, directory)
    if changed := [line for line in found if not is_under(line, allowed)]:
        listing = "\n  ".join(changed)
        raise ConfigError(
            f"This config is not that of the run in {directory.path}:\n  {listing}\n"
            "Restore these values to resume; name those that may change, as in --allow "
            f"{changed[0].partition(':')[0]}; or give the new run an output of its own and run.init_from."
        )
    return tuple(found)
