"""Events of a run, as typed values that `event_bus` delivers to observers on the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CheckpointRestored",
    "CheckpointSaved",
    "CheckpointSkipped",
    "EvaluationFinished",
    "Event",
    "FormationFormed",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepFinished",
    "StepStarted",
    "WorkerDied",
]


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The training step is compiled, and the first step is about to run.

    Attributes:
      first_step: number of steps completed before, 0 for a new run.
      steps: total number of steps of the run.
      parameters: number of trained parameters.
      work: maximum work of a step: a unit, such as "tokens", and their number.
      flops_per_step: the model's FLOPs per step, without rematerialization.
      ideal_step_s: time of those FLOPs at the combined peak of all chips, or None if a peak is unknown.
      compile_s: wall time of tracing and compiling the step.
      directory: the run's directory.
      setup_s: wall time since the run was requested, including `compile_s`.
      shown_metrics: names of the metrics to display next to the loss, see `Objective`.
      rate_metrics: names of the metrics to display per second, see `Objective`.
      notes: lines about the objective, see `Objective`.
    """

    first_step: int
    steps: int
    parameters: int
    work: tuple[str, int]
    flops_per_step: int
    ideal_step_s: float | None
    compile_s: float
    directory: Path
    setup_s: float = 0.0
    shown_metrics: tuple[str, ...] = ()
    rate_metrics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepStarted(Event):
    """Step `step`, counted from 1, was dispatched."""

    step: int


@dataclass(frozen=True)
class StepFinished(Event):
    """The devices completed step `step`.

    Attributes:
      step: number of the step, from 1.
      metrics: host floats, including "loss".
      duration_s: time since the completion of the previous step, or since its own dispatch if the loop paused in
        between.
      work_per_s: throughput in the unit of `RunStarted.work`.
      mfu: the model's FLOP/s over the chips' peak, or None if the peak is unknown.
      data_wait_s: time spent waiting for the next batch while the devices were idle.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float
    work_per_s: float
    mfu: float | None
    data_wait_s: float = 0.0


@dataclass(frozen=True)
class EvaluationFinished(Event):
    """The evaluation after step `step` finished.

    Attributes:
      step: number of completed steps.
      metrics: host floats.
      duration_s: wall time of the evaluation.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk; saving it blocked training for `blocked_s` seconds."""

    step: int
    path: Path
    blocked_s: float


@dataclass(frozen=True)
class CheckpointRestored(Event):
    """The run was restored from the checkpoint of step `step`."""

    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointSkipped(Event):
    """A damaged or incomplete checkpoint was skipped in favour of an older one."""

    path: Path
    reason: str


@dataclass(frozen=True)
class RunFinished(Event):
    """All steps are complete and saved."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RunFailed(Event):
    """The run ended before its last step, by an error or Ctrl-C."""

    error: BaseException


@dataclass(frozen=True)
class FormationFormed(Event):
    """The workers of a run over several hosts were forked; `hosts` is the host of each rank."""

    number: int
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class WorkerDied(Event):
    """A formation ended; the next one resumes from the last checkpoint.

    Attributes:
      rank: rank of the worker that caused the failure; None if no worker can be blamed.
      host: host of that worker, or None.
      step: last step that the formation began; None before the first.
      reason: sentence that names the culprit and the evidence.
    """

    rank: int | None
    host: int | None
    step: int | None
    reason: str
