"""What happens during a run, as typed values handed to observers on the host."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.protocols import Observer

__all__ = [
    "CheckpointRestored",
    "CheckpointSaved",
    "CheckpointSkipped",
    "EvaluationFinished",
    "Event",
    "EventBus",
    "ObserverContext",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepFinished",
    "StepStarted",
]


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class RunStarted(Event):
    """The step is compiled and the first one is about to run.

    Attributes:
      first_step: steps done before, 0 for a new run.
      steps: steps that the whole run has.
      parameters: numbers that are trained.
      flops_per_step: the model's FLOPs, rematerialization left out.
      ideal_step_s: those FLOPs at the peak of all chips together, or None where a peak is not known.
      compile_s: wall time that tracing and compiling the step took.
    """

    first_step: int
    steps: int
    parameters: int
    tokens_per_step: int
    flops_per_step: float
    ideal_step_s: float | None
    compile_s: float
    directory: Path


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
      mfu: the model's FLOPs over the chips' peak, or None where that is not known.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float
    tokens_per_s: float
    mfu: float | None


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
    """The run stops before its last step."""

    step: int
    error: BaseException


@dataclass(frozen=True)
class ObserverContext:
    """What an observer may need when it is made.

    Attributes:
      directory: the run's directory.
      config: the resolved config of the whole run.
      terminal: whether progress may be drawn.
    """

    directory: Path
    config: Any
    terminal: bool


@dataclass
class EventBus:
    """Hands each event to every observer; one that fails is named in a warning and left out from then on."""

    observers: list[Observer] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        for observer in tuple(self.observers):
            self._guarded(observer, observer.observe, event)

    def close(self) -> None:
        for observer in tuple(self.observers):
            self._guarded(observer, observer.close)
        self.observers.clear()

    def __enter__(self) -> "EventBus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _guarded(self, observer: Observer, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # An observer, perhaps a stranger's, must never cost the run it watches.
            self.observers.remove(observer)
            name = type(observer).__name__
            warnings.warn(f"Observer {name} failed and is left out: {type(error).__name__}: {error}", stacklevel=3)


def observers_from(factories: Iterable[Any], context: ObserverContext) -> list[Observer]:
    """Builds the observers that have something to do in `context`."""
    built = (factory(context) for factory in factories)
    return [observer for observer in built if observer is not None]
