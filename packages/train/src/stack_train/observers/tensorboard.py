"""TensorBoard event files in `tensorboard/` of the run directory."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import EvaluationFinished, Event, RunStarted, StepFinished
from stack_train.observers.scalars import scalars

__all__ = ["TensorBoardObserver", "tensorboard_observer"]

_FLUSH_S = 10.0


def tensorboard_observer(context: ObserverContext) -> "TensorBoardObserver":
    """Builds the TensorBoard observer of a run."""
    return TensorBoardObserver(context.directory / "tensorboard")


class TensorBoardObserver:
    """Writes scalars under `train/` and `validation/`; a resumed run purges the steps that it repeats.

    It does not use `SummaryWriter`, which hangs forever after a full disk has ended its writer thread.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._messages: Any = None
        self._unit = "tokens"
        self._flushed_s = 0.0

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._unit = event.work[0]
                self._open(purged_step=event.first_step + 1)
            case StepFinished() | EvaluationFinished():
                self._write_scalars(scalars(event, self._unit), event.step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _open(self, purged_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # costs 0.3 s: only once a run has begun
        from tensorboardX.proto import event_pb2

        self._messages = event_pb2
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(self._directory / "events"))
        self._write(purged_step, session_log={"status": "START"})
        self._writer.flush()

    def _write_scalars(self, values: Mapping[str, float], step: int) -> None:
        if not self._writer:
            return
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(step, summary=scalar(name, value))
        if time.monotonic() - self._flushed_s >= _FLUSH_S:
            self._flushed_s = time.monotonic()
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._messages.Event(wall_time=time.time(), step=step, **content))
