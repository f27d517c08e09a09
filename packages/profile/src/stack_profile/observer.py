"""Captures some steps of a training run: those that its `profile:` section names."""

import warnings
from pathlib import Path

from pydantic import PositiveInt

from stack_core.config import config
from stack_core.event_bus import ObserverContext
from stack_core.events import Event, RunFailed, RunFinished, RunStarted, StepFinished, StepStarted
from stack_profile._capture import Capture, CaptureWarning, capture

__all__ = ["ProfileConfig", "ProfileObserver", "profile_observer"]


@config
class ProfileConfig:
    """The section `profile:` of a run.

    Attributes:
      first_step: the first step to capture, counted from 1; the first few are slower than those that follow.
      steps: how many.
      output: the directory of the capture, by default `profile` in that of the run.
    """

    first_step: PositiveInt = 10
    steps: PositiveInt = 5
    output: str | None = None


def profile_observer(context: ObserverContext) -> "ProfileObserver | None":
    """The capture that the run of `context` asks for; None where it has no section `profile:`."""
    section = getattr(context.config, "sections", {}).get("profile")
    if section is None:
        return None
    return ProfileObserver(section, Path(section.output) if section.output else context.directory / "profile")


class ProfileObserver:
    """Opens at the start of the first step and closes when the last one is done.

    The device is a step ahead of the host, so the trace also has the end of the step before and the start of the one
    after; the analyses leave these out.
    """

    def __init__(self, section: ProfileConfig, directory: Path) -> None:
        self._first, self._last = section.first_step, section.first_step + section.steps - 1
        self._directory = directory
        self._capture: Capture | None = None

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted() if not event.first_step < self._first <= event.steps:
                warnings.warn(
                    f"Nothing will be captured: the run does the steps {event.first_step + 1} to {event.steps}, and "
                    f"profile.first_step is {self._first}.",
                    CaptureWarning,
                    stacklevel=2,
                )
            case StepStarted(step=step) if step == self._first:
                self._capture = capture(self._directory, name=f"steps_{self._first}_to_{self._last}").start()
            case StepFinished(step=step) if step >= self._last:
                self._stop()
            case RunFinished() | RunFailed():
                self._stop()

    def close(self) -> None:
        self._stop()
        if self._capture is not None:
            self._capture.wait()

    def _stop(self) -> None:
        if self._capture is not None:
            self._capture.stop(settle=False)
