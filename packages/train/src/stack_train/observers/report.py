"""`report.html` in the run's directory, written when the run evaluates and when it ends."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.config import to_mapping
from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import EvaluationFinished, Event, RunFailed, RunFinished, RunStarted
from stack_train.panels.run_report import write_report

__all__ = ["ReportObserver", "report_observer"]

_REST = 100.0


def report_observer(context: ObserverContext) -> "ReportObserver":
    """Builds the report observer of a run."""
    return ReportObserver(context.directory, to_mapping(context.config))


class ReportObserver:
    """Writes the report at the end, and at evaluations if that takes at most a hundredth of the run's time.

    Observers receive events in the order of their names, so the report contains the lines of `history` and `jsonl`.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory, self._config = directory, config
        self._runs = False
        self._due_s = 0.0

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._runs = True
            case EvaluationFinished() if time.monotonic() >= self._due_s:
                self._write()
            case RunFinished() | RunFailed():
                self.close()

    def close(self) -> None:
        if self._runs:
            self._runs = False
            write_report(self._directory, self._config)

    def _write(self) -> None:
        if self._runs:
            started_s = time.monotonic()
            write_report(self._directory, self._config)
            ended_s = time.monotonic()
            self._due_s = ended_s + _REST * (ended_s - started_s)
