"""Base class of experiment trackers: one run of the tracker for all sessions, and the scalars of its events."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from stack_core.abi.errors import ConfigError, Interrupted
from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import EvaluationFinished, Event, RunFailed, RunFinished, RunStarted, StepFinished
from stack_train.observers.scalars import scalars

__all__ = ["Tracker", "require"]


def require(context: ObserverContext, section: str, package: str) -> None:
    """Checks that the package of a tracker is installed.

    Raises:
      ConfigError: it is not; names the extra to install.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"The section {section!r} of {context.directory} needs the package {package!r}, which is not installed: "
            f"pip install 'stack-train[{section}]', or leave the section out."
        )


class Tracker(ABC):
    """Observer that copies a run's scalars to an experiment tracker.

    All sessions of a run, such as those after `--resume`, write to one run of the tracker, whose id is stored in the
    run's directory. Steps that a resumed session repeats are sent again with the same values.

    Attributes:
      directory: the run's directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._id = directory / f"{type(self).__name__.removesuffix('Tracker').lower()}_run_id"
        self._unit = "tokens"
        self._is_open = False

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._unit = event.work[0]
                self._id.write_text(self.open(self._id.read_text() if self._id.exists() else None))
                self._is_open = True
            case StepFinished() | EvaluationFinished() if self._is_open:
                self.log(scalars(event, self._unit), event.step)
            case RunFinished():
                self._end("finished")
            case RunFailed(error=Interrupted() | KeyboardInterrupt()):
                self._end("stopped")
            case RunFailed():
                self._end("failed")

    def close(self) -> None:
        self._end("stopped")

    def _end(self, status: str) -> None:
        if self._is_open:
            self._is_open = False
            self.end(status)

    @abstractmethod
    def open(self, run_id: str | None) -> str:
        """Starts a run of the tracker, or continues the run `run_id`; returns its id."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the scalars of a step."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Ends the session as "finished", "stopped" or "failed"."""
