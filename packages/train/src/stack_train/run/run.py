"""Construction of a run from its config. All checks are done before anything is written."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from stack_core import ops
from stack_core.abi.config import to_mapping
from stack_core.abi.data import Batches
from stack_core.abi.errors import ConfigError, PluginError
from stack_core.abi.policy import PolicyBatches
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.processes import ALONE, Processes, join
from stack_train.data.abilities import BuildsAtOnce
from stack_train.data.ramp import RampedBatches, check_ramp
from stack_train.run.checks import check
from stack_train.run.config import RunConfig, batches_of
from stack_train.run.memory import check_state
from stack_train.run.placing import local_rows
from stack_train.run.program import build_program, naming_sizes, traced_step
from stack_train.run.resolve import resolve
from stack_train.run.start import Start
from stack_train.step.program import Program
from stack_train.storage.address import is_storage
from stack_train.storage.remote_run import RemoteRun, run_path

__all__ = ["Run", "build", "build_data"]


def build(config: RunConfig, *, resume: bool = False, allow: Sequence[str] = ()) -> "Run":
    """Builds a run without writing anything, except for the local copy of a run in object storage.

    Args:
      config: config of the run.
      resume: resume the run in the directory.
      allow: config keys that may differ from the resumed run, or from the start, `run.init_from`.

    Raises:
      StackError: the config, the data or the directory is not usable, or the run does not fit the devices' memory.
    """
    began_s = time.perf_counter()
    processes = join(config.processes)
    with processes.ending_together():
        return replace(_built(config, resume, tuple(allow), processes), began_s=began_s)


def _built(config: RunConfig, resume: bool, allowed: tuple[str, ...], processes: Processes) -> "Run":
    # The id is the only setting that must differ between processes.
    mapping = to_mapping(replace(config, processes=replace(config.processes, id=None)))
    processes.check_alike("config", mapping | {"--resume": resume, "--allow": list(allowed)})
    remote = _opened_storage(config, resume, processes)
    if processes.first:
        RunDirectory(run_path(config.output)).check(resume=resume)
    resolved = resolve(config, resume=resume)
    changes = check(resolved, allowed)
    config = resolved.config
    program = build_program(config)
    # Before tracing: an estimate from shapes is immediate, and its message is clearer than the compiler's.
    with naming_sizes(config):
        check_state(program)
    traced = traced_step(config, program)
    batches = batches_of(resolved.data, config.objective)
    batch_size = next(iter(batches.spec(config.model).values())).shape[0]
    check_ramp(config.run.ramp, batch_size, program.batch_parts)
    data = build_data(processes, batches, lambda: batches.build(seed=config.run.seed, model=config.model))
    rows = None
    if not isinstance(data, Batches):
        raise PluginError(
            f"data.name {config.data.name!r} built a {type(data).__name__}; expected a stack_core.abi.data.Batches."
        )
    if program.step.outer is not None and isinstance(data, PolicyBatches):
        raise ConfigError(
            f"optimizer.outer.replicas is {program.step.outer.replicas}, and data.name {config.data.name!r} makes its "
            "batches with the policy, of which there would be several. Set optimizer.outer.replicas=1."
        )
    if config.run.ramp:
        data = _ramped(config, data, batch_size)
    if processes.count > 1:
        local = local_rows(program, config.batches.spec(config.model))
        if (of_process := data.with_rows(local)) is not None:
            data, rows = of_process, local
    return Run(
        config=config,
        directory=resolved.directory,
        program=program,
        traced=traced,
        data=data,
        start=resolved.start,
        resume=resume,
        changes=changes,
        processes=processes,
        rows=rows,
        choices=ops.choices(),
        remote=remote,
    )


def _ramped(config: RunConfig, data: Batches, batch_size: int) -> Batches:
    if isinstance(data, PolicyBatches):
        raise ConfigError(
            f"run.ramp divides batches of stored data, and data.name {config.data.name!r} makes its batches with the "
            "policy. Leave run.ramp out."
        )
    return RampedBatches(data, config.run.ramp, batch_size)


def _opened_storage(config: RunConfig, resume: bool, processes: Processes) -> RemoteRun | None:
    """Checks the object storage of a run, and makes its local copy; returns None for a run without."""
    if not is_storage(config.output):
        return None
    if processes.count > 1:
        raise ConfigError(
            f"output is {config.output!r}, but the run has {processes.count} processes, which need a directory "
            "that all of them share. Mount the bucket, or set output to a shared directory."
        )
    remote = RemoteRun(config.output, keep=config.checkpoint.keep)
    remote.prepare(resume=resume)
    return remote


def build_data(processes: Processes, batches: Any, build: Callable[[], Any]) -> Any:
    """Builds data in the first process, which trains the tokenizer and tokenizes, then from its cache elsewhere.

    Prepared data is only opened, for which no process waits.
    """
    if isinstance(batches, BuildsAtOnce) and batches.is_ready:
        return build()
    return processes.in_turn("data", build)


@dataclass(frozen=True)
class Run:
    """A run that is ready for `stack_train.run.train`.

    Attributes:
      config: resolved config.
      directory: run directory.
      program: program of the train step on the run's mesh.
      traced: the train step, traced for the run's batch shapes; nothing is allocated.
      data: training and validation batches.
      start: run or published checkpoint in `run.init_from`; None for random initial parameters.
      resume: resumes from the newest checkpoint in the directory.
      changes: config differences to the resumed run, such as "optimizer.learning_rate: ...".
      processes: processes that train together.
      rows: rows of the global training batch that `data` yields in this process; None if it yields all rows.
      choices: op implementations that the step uses, from `ops.choices()`.
      remote: object storage of the run; None for a run in a directory.
      began_s: `time.perf_counter()` when `build` was called.
    """

    config: RunConfig
    directory: RunDirectory
    program: Program
    traced: jax.stages.Traced
    data: Batches
    start: Start | None = None
    resume: bool = False
    changes: tuple[str, ...] = ()
    processes: Processes = ALONE
    rows: Int64[np.ndarray, " own"] | None = None
    choices: Sequence[Mapping[str, Any]] = ()
    remote: RemoteRun | None = None
    began_s: float = field(default_factory=time.perf_counter)

    def __repr__(self) -> str:
        state = "to resume" if self.resume else "new"
        parameters = f"{self.program.step.model.parameter_count:,} parameters"
        return f"<Run {self.config.output}, {state}: {parameters}, {self.config.run.steps:,} steps>"
