"""Captures parts of a training run, as its `profile:` section requests: given steps, slow steps, or on demand."""

import warnings
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import Event, RunFailed, RunFinished, RunStarted, StepFinished, StepStarted
from stack_profile.captures.capture import Capture, CaptureWarning, capture
from stack_profile.captures.listener import listen
from stack_profile.captures.out_of_memory import save_out_of_memory
from stack_profile.captures.python_heap import load_memray
from stack_profile.captures.ring import ContinuousConfig
from stack_profile.captures.slow_steps import AnomalyConfig
from stack_profile.captures.stacks import HIGHEST_HZ, STACKS_HZ
from stack_profile.captures.watch import Watch

__all__ = ["ProfileConfig", "ProfileObserver", "profile_observer"]


@config
class ProfileConfig:
    """The `profile:` section of a run.

    Attributes:
      first_step: first step to capture, counted from 1; the default skips the slower first steps.
      steps: number of steps to capture; 0 captures none.
      anomaly: settings for capturing anomalously slow steps, `{}` for the defaults; None disables this.
      continuous: settings for a ring of captures on disk, `{}` for the defaults; None disables this. It also captures
        slow steps, as `anomaly` defines them.
      listen: True if `stack profile attach` can capture the run.
      stacks_hz: samples of the threads' Python stacks per second in captures of steps; 0 for none.
      python_heap: whether memray tracks Python's allocations in captures of steps, which slows them.
      output: directory of the captures; None is `profile` in the run's directory.
    """

    first_step: PositiveInt = 10
    steps: NonNegativeInt = 5
    anomaly: AnomalyConfig | None = None
    continuous: ContinuousConfig | None = None
    listen: bool = False
    stacks_hz: Annotated[float, Field(ge=0, le=HIGHEST_HZ)] = STACKS_HZ
    python_heap: bool = False
    output: str | None = None


def profile_observer(context: ObserverContext) -> "ProfileObserver | None":
    """Returns the observer for a run, or None without a `profile:` section."""
    section = getattr(context.config, "sections", {}).get("profile")
    if section is None:
        return None
    output = Path(section.output) if section.output else context.directory / "profile"
    return ProfileObserver(section, output, context.directory)


class ProfileObserver:
    """Observer that captures the configured steps, and slow steps at any time.

    The device lags the host by a step, so the trace also has the end of the step before the first and the start of the
    step after the last. The analyses omit these parts.
    """

    # On the loop's thread, because a capture must start before its first step is dispatched.
    in_loop: Final = True

    def __init__(self, section: ProfileConfig, directory: Path, run: Path | None = None) -> None:
        import jax

        if section.python_heap:
            load_memray()  # its absence ends the run at its start, not at the first captured step
        self._first, self._last = section.first_step, section.first_step + section.steps - 1
        self._directory = directory
        self._stacks_hz, self._python_heap = section.stacks_hz, section.python_heap
        self._capture: Capture | None = None
        # The loop dispatches a step before it reads the results of the previous one. In one process, because processes
        # that each capture their own slow steps would write traces of different times.
        watches = section.anomaly is not None or section.continuous is not None
        self._watch: Watch | None = None
        if watches and jax.process_index() == 0:
            self._watch = Watch(directory, section.anomaly, continuous=section.continuous, runs_ahead=True)
        self._listener = listen(run=run) if section.listen else None

    def observe(self, event: Event) -> None:
        match event:
            # A resumed run may have passed the first step to capture.
            case RunStarted() if self._last >= self._first and not event.first_step < self._first <= event.steps:
                warnings.warn(
                    f"Nothing will be captured: the run does the steps {event.first_step + 1} to {event.steps}, and "
                    f"profile.first_step is {self._first}.",
                    CaptureWarning,
                    stacklevel=2,
                )
            case StepStarted(step=step) if step == self._first <= self._last:
                name = f"steps_{self._first}_to_{self._last}"
                captured = capture(self._directory, name=name, stacks_hz=self._stacks_hz, python_heap=self._python_heap)
                self._capture = captured.start()
            case StepFinished(step=step, duration_s=duration_s):
                if step >= self._last:
                    self._stop()
                if self._watch is not None:
                    self._watch.finished(step, duration_s)
            case RunFinished():
                self._stop()
            case RunFailed(error=error):
                # A running capture stores the state of a full memory with its trace.
                if self._capture is None or not self._capture.is_running:
                    save_out_of_memory(self._directory, error)
                self._stop(error)

    def close(self) -> None:
        self._stop()
        if self._listener is not None:
            self._listener.close()
        if self._watch is not None:
            self._watch.close()
        if self._capture is not None:
            self._capture.wait()

    def _stop(self, error: BaseException | None = None) -> None:
        if self._capture is not None:
            # Without waiting for arrays, which would stall the device between two steps.
            self._capture.stop(settle=False, error=error)
