"""`history.jsonl` in the run directory: start and end of each session."""

import datetime
import json
import time
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.errors import Interrupted
from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import Event, RunFailed, RunFinished, RunStarted, StepFinished

__all__ = ["HistoryObserver", "history_observer"]


def history_observer(context: ObserverContext) -> "HistoryObserver":
    """Builds the history observer of a run."""
    return HistoryObserver(context.directory / "history.jsonl")


class HistoryObserver:
    """Appends `{"event": "started" | "finished" | "stopped" | "failed", "time": ..., "step": ...}`.

    An end has `elapsed_s` since the start, by the monotonic clock. A killed session leaves no end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step = 0
        self._runs = False
        self._started_s = 0.0

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._runs, self._step, self._started_s = True, event.first_step, time.monotonic()
                names = ("steps", "parameters", "work", "compile_s", "shown_metrics")
                facts = {name: getattr(event, name) for name in names}
                devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
                self._append("started", **facts, devices=devices)
            case StepFinished():
                self._step = event.step
            case RunFinished():
                self._end("finished")
            case RunFailed(error=Interrupted() | KeyboardInterrupt()):
                self._end("stopped")
            case RunFailed():
                self._end("failed", error=f"{type(event.error).__name__}: {event.error}")

    def close(self) -> None:
        self._end("stopped")  # by a signal such as SIGTERM, which emits no event

    def _end(self, event: str, **fields: Any) -> None:
        if self._runs:
            self._runs = False
            self._append(event, elapsed_s=round(time.monotonic() - self._started_s, 3), **fields)

    def _append(self, event: str, **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": now, "step": self._step, **fields}) + "\n")
