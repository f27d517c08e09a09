"""Construction of a run from its config. All checks are done before anything is written."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from stack_core import ops
from stack_core.abi.config import differences, dotted_keys, is_under, to_mapping, with_current_keys
from stack_core.abi.data import Batches
from stack_core.abi.errors import ConfigError, PluginError, nearest
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.processes import ALONE, Processes, join
from stack_train.run.checks import check_run, check_start
from stack_train.run.config import RunConfig, saved_config
from stack_train.run.memory import check_state
from stack_train.run.placing import local_rows
from stack_train.run.program import build_program, naming_sizes, traced_step
from stack_train.run.source_files import changed_files
from stack_train.run.start import data_of_resumed, with_tokenizer_of_start
from stack_train.step.program import Program
from stack_train.variables.model_variables import sharding_rules

__all__ = ["Run", "build", "fixed_differences"]

# Keys that determine what a run learns must not change on resume. Its length, directory and outputs may.
_FIXED = ("model", "data", "objective", "optimizer", "precision", "run.accumulation_steps", "run.seed")
_FREE = ("data.prefetch_batches", "model.remat", "model.unroll")


def build(config: RunConfig, *, resume: bool = False, allow: Sequence[str] = ()) -> "Run":
    """Builds a run without writing anything.

    Args:
      config: config of the run.
      resume: resume the run in the directory.
      allow: config keys that may differ from the resumed run, or from the run or checkpoint that this run starts from.

    Raises:
      StackError: the config, the data or the directory is not usable, or the run does not fit the devices' memory.
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
    program = build_program(config)
    with naming_sizes(config):
        check_state(program)
    traced = traced_step(config, program)
    # One process after the other: the first trains the tokenizer and tokenizes, the others read its cache.
    kind = data_of_resumed(config) if resume else config.data
    data = processes.in_turn("data", lambda: kind.build(seed=config.run.seed, model=config.model))
    rows = None
    if not isinstance(data, Batches):
        raise PluginError(
            f"data.name {config.data.name!r} built a {type(data).__name__}; expected a stack_core.abi.data.Batches."
        )
    if processes.count > 1:
        own = local_rows(program, config.data.spec(config.model))
        if (of_process := data.with_rows(own)) is not None:
            data, rows = of_process, own
    return Run(config, directory, program, traced, data, resume, changes, processes, rows, ops.choices())


@dataclass(frozen=True)
class Run:
    """A run that is ready to start; `stack_train.run.train` starts it.

    Attributes:
      config: resolved config.
      directory: run directory.
      program: program of the train step on the run's mesh.
      traced: the train step, traced for the run's batch shapes; nothing is allocated.
      data: training and validation batches.
      resume: whether to resume from the newest checkpoint in the directory.
      changes: config differences to the resumed run, such as "optimizer.learning_rate: ...".
      processes: processes that train together.
      rows: rows of the global training batch that `data` yields in this process; None if it yields all rows.
      choices: op implementations that the step uses, from `ops.choices()`.
      began_s: `time.perf_counter()` when `build` was called.
    """

    config: RunConfig
    directory: RunDirectory
    program: Program
    traced: jax.stages.Traced
    data: Batches
    resume: bool = False
    changes: tuple[str, ...] = ()
    processes: Processes = ALONE
    rows: Int64[np.ndarray, " own"] | None = None
    choices: Sequence[Mapping[str, Any]] = ()
    began_s: float = field(default_factory=time.perf_counter)


def _with_all_rules(config: RunConfig) -> RunConfig:
    """Adds the sharding rules of the model family and the default rules, so that the saved config lists all rules."""
    rules = sharding_rules(registries.models[config.model.name], config.mesh.rules)
    return replace(config, mesh=replace(config.mesh, rules=dict(rules.table)))


def _check_allowed(config: RunConfig, directory: RunDirectory, resume: bool, allowed: tuple[str, ...]) -> None:
    """Raises a ConfigError if `--allow` has no effect: there is no earlier config, or a key does not exist."""
    if not allowed:
        return
    if not resume and config.run.init_from is None:
        raise ConfigError(
            f"--allow {allowed[0]} has no effect: this run does not start from another run. Leave it out, or give "
            "--resume or run.init_from."
        )
    keys = dotted_keys(to_mapping(config))
    if resume:
        keys |= dotted_keys(saved_config(directory))
    for key in allowed:
        if key not in keys:
            raise ConfigError(
                f"--allow {key}: the config has no such key.{nearest(key, keys)} Give a whole key or section, such as "
                "optimizer.learning_rate or data."
            )


def fixed_differences(config: RunConfig, saved: Mapping[str, Any]) -> list[str]:
    """Lists differences from a saved config in keys that affect training, such as "data.batch_size: 4, not 8"."""
    # Configs without the section `precision` come from runs that trained parameters in their published dtype.
    precision = {"params": saved.get("model", {}).get("param_dtype", "float32")}
    lines = differences(to_mapping(config), {"precision": precision, **with_current_keys(RunConfig, saved)})
    fixed = (*_FIXED, *registries.transforms.names())
    return [line for line in lines if is_under(line, fixed) and not is_under(line, _FREE)]


def _changes(config: RunConfig, directory: RunDirectory, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Lists the changed config keys and data files that affect what a resumed run learns.

    Raises:
      ConfigError: a changed key is not in `allowed`.
    """
    saved = saved_config(directory)
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
