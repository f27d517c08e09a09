"""TensorBoard event files in the run's `tensorboard/` directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.events import EvaluationFinished, Event, RunStarted, StepFinished
from stack_core.runs.event_bus import ObserverContext

__all__ = ["TensorBoardObserver", "tensorboard_observer"]


def tensorboard_observer(context: ObserverContext) -> "TensorBoardObserver":
    """The event files of the run of `context`."""
    return TensorBoardObserver(context.directory / "tensorboard")


class TensorBoardObserver:
    """Writes scalars under `train/` and `validation/`; a resumed run purges the steps that it does again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._unit = "tokens"

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._unit = event.work[0]
                from tensorboardX import SummaryWriter  # costs 0.3 s: only once a run has begun

                self._writer = SummaryWriter(str(self._directory), purge_step=event.first_step + 1)
            case StepFinished():
                rates = {f"{self._unit}_per_s": event.work_per_s, "duration_s": event.duration_s}
                if event.mfu is not None:
                    rates["mfu"] = event.mfu
                self._scalars("train", {**event.metrics, **rates}, event.step)
            case EvaluationFinished():
                self._scalars("validation", event.metrics, event.step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(f"{prefix}/{name}", value, step)
