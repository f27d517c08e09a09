"""What happens during a run, as typed values that `event_bus` hands to observers on the host."""

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
    """The step is compiled and the first one is about to run.

    Attributes:
      first_step: steps done before, 0 for a new run.
      steps: steps that the whole run has.
      parameters: numbers that are trained.
      work: what a step does at most: a unit, such as "tokens", and how many.
      flops_per_step: the model's FLOPs, rematerialization left out.
      ideal_step_s: those FLOPs at the peak of all chips together, or None where a peak is not known.
      compile_s: wall time that tracing and compiling the step took.
      setup_s: wall time since the run was asked for, `compile_s` in it.
      shown_metrics: names of the metrics to show beside the loss, see `ShowsMetrics`.
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


@dataclass(frozen=True)
class StepStarted(Event):
    """Step `step`, counted from 1, was dispatched."""

    step: int


@dataclass(frozen=True)
class StepFinished(Event):
    """Step `step` was completed by the device.

    Attributes:
      metrics: host floats, "loss" among them.
      duration_s: from the completion of the step before, or from its own dispatch where the loop paused in between.
      work_per_s: of the unit that `RunStarted.work` names.
      mfu: the model's FLOPs over the chips' peak, or None where that is not known.
      data_wait_s: how long the next batch was waited for, where the devices had nothing left to do by then.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float
    work_per_s: float
    mfu: float | None
    data_wait_s: float = 0.0


@dataclass(frozen=True)
class EvaluationFinished(Event):
    step: int
    metrics: Mapping[str, float]
    duration_s: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is whole on disk; training was blocked for `blocked_s` of its making."""

    step: int
    path: Path
    blocked_s: float


@dataclass(frozen=True)
class CheckpointRestored(Event):
    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointSkipped(Event):
    """A damaged or partial checkpoint was passed over in favour of an older one."""

    path: Path
    reason: str


@dataclass(frozen=True)
class RunFinished(Event):
    """All steps are done and saved."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RunFailed(Event):
    """The run ends before its last step, by an error or by Ctrl-C."""

    error: BaseException


@dataclass(frozen=True)
class FormationFormed(Event):
    """The workers of a run over several hosts were forked; `hosts` is where each rank is."""

    number: int
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class WorkerDied(Event):
    """A formation ends, and the next one goes on from the last checkpoint.

    Attributes:
      rank: of the worker that caused it; None where nobody can be blamed.
      step: that was being done; None before the first.
      reason: a sentence that names the culprit and its evidence.
    """

    rank: int | None
    host: int | None
    step: int | None
    reason: str
