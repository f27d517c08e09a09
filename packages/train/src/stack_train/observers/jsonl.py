"""`metrics.jsonl` in the run directory: one JSON object per completed step or evaluation."""

import json
from pathlib import Path
from typing import Any

from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import EvaluationFinished, Event, RunStarted, StepFinished

__all__ = ["JsonlObserver", "jsonl_observer"]


def jsonl_observer(context: ObserverContext) -> "JsonlObserver":
    """Builds the observer of a run's metrics file."""
    return JsonlObserver(context.directory / "metrics.jsonl")


class JsonlObserver:
    """Appends `{"kind": "train" | "evaluation", "step": ..., metrics...}`.

    A resumed run first deletes the lines of the steps that it repeats, so each step appears once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._unit = "tokens"

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._unit = event.work[0]
                _drop_after(self._path, event.first_step)
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            case StepFinished():
                rates = {f"{self._unit}_per_s": event.work_per_s, "mfu": event.mfu, "duration_s": event.duration_s}
                self._write({"kind": "train", "step": event.step, **event.metrics, **rates})
            case EvaluationFinished():
                self._write({"kind": "evaluation", "step": event.step, **event.metrics, "duration_s": event.duration_s})

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    partial = path.with_suffix(".partial")
    with path.open(encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as kept:
        kept.writelines(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step)
    partial.replace(path)
