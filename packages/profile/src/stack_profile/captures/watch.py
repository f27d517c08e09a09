"""Saves the traces of anomalously slow steps by recording every step and discarding the normal ones.

Recordings stay in memory, without the compiled programs. Discarding one every few steps costs a fraction of a
millisecond; encoding costs ten times as much and is done only for slow steps. A requested capture takes the profiler
and interrupts watching. If starting and discarding cost too much, recordings get fewer and longer; if that is not
enough, watching stops with a warning.
"""

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stack_profile.captures.capture import Capture, CaptureWarning
from stack_profile.captures.recording import Recording, record
from stack_profile.captures.slow_steps import AnomalyConfig, SlowSteps
from stack_profile.errors import CaptureError

__all__ = ["Watch"]

_SHORTEST_STEPS, _LONGEST_STEPS = 8, 64  # steps per recording
_MOST_SHARE: Final = 0.01  # maximum share of step time for starting and discarding recordings
_CHECKED_RECORDINGS: Final = 8
_COMPILED: Final = "/jax/core/compile/backend_compile_duration"


class Watch:
    """Watches a loop and saves the traces of anomalously slow steps.

        with stack_profile.Watch("out") as watch:
            for batch in batches:
                with watch.step():
                    state = jax.block_until_ready(train_step(state, batch))

    Steps with a compilation are ignored; `stack profile compile` reports compilations.

    Attributes:
      captures: saved traces, named `slow_step_N`; each also has some steps before the slow one.
    """

    def __init__(self, out: str | Path, settings: AnomalyConfig | None = None, *, runs_ahead: bool = False) -> None:
        """Starts watching.

        Args:
          out: directory of the captures.
          settings: definition of slow steps, by default `AnomalyConfig()`.
          runs_ahead: whether the device has already begun the next step when a step is reported.
        """
        import jax

        self._out, self._runs_ahead = Path(out), runs_ahead
        self._slow = SlowSteps(settings or AnomalyConfig())
        self._recording: Recording | None = None
        self._window_steps, self._first_step, self._last_step = _SHORTEST_STEPS, 0, 0
        self._compiled, self._gives_up = False, False
        self._recordings, self._held_s, self._watched_s, self._gap_s = 0, 0.0, 0.0, 0.0
        self.captures: list[Capture] = []
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Times one step, which must finish inside the block."""
        started_s = time.perf_counter()
        yield
        self.finished(self._last_step + 1, time.perf_counter() - started_s)

    def finished(self, step: int, duration_s: float) -> None:
        """Reports a finished step; `step` names its trace."""
        self._last_step = step
        self._watched_s += duration_s if self._recording is not None else 0.0
        compiled, self._compiled = self._compiled, False
        threshold_s = None if compiled else self._slow.exceeded_s(duration_s)
        if threshold_s is not None:
            self._keep(step, {"step": step, "duration_s": duration_s, "threshold_s": threshold_s})
        lost = self._recording is None or self._recording.lost
        # Also if no step can be judged: then the recording is only discarded.
        if lost or not self._slow.is_armed or step + 1 - self._first_step >= self._window_steps:
            self._renew(step + 1)

    def close(self) -> None:
        """Stops watching, and waits until saved traces are written. Later calls do nothing."""
        self._give_up()
        for captured in self.captures:
            with contextlib.suppress(CaptureError):  # the writer has already warned
                captured.wait()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _hear(self, event: str, duration_secs: float, **about: Any) -> None:
        self._compiled |= event == _COMPILED

    def _keep(self, step: int, slow_step: dict[str, Any]) -> None:
        recording, self._recording = self._recording, None
        if recording is None or recording.lost:
            return  # another capture has taken the profiler
        about: dict[str, Any] = {"slow_step": slow_step}
        if self._runs_ahead and step == self._first_step:
            about["partial"] = f"the first {1e3 * self._gap_s:.2g} ms of step {step} are missing"
        try:
            captured = Capture(self._out, name=f"slow_step_{step}").start(recording)
        except CaptureError as error:
            warnings.warn(f"The trace of the slow step {step} is lost: {error}", CaptureWarning, stacklevel=3)
            return
        captured.stop(settle=False, about=about)
        self.captures.append(captured)

    def _renew(self, next_step: int) -> None:
        """Replaces the recording by a new one if the next step can be judged."""
        started_s = time.perf_counter()
        self._forget()
        if self._slow.is_armed and not self._gives_up:
            with contextlib.suppress(CaptureError):  # another capture is running; the next step tries again
                self._recording = record(host_tracer_level=2, programs=False, yields=True)
            self._first_step = next_step
            # If the device runs ahead, this much of the next step is not recorded.
            self._gap_s = time.perf_counter() - started_s
            self._account()

    def _forget(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.discard()

    def _account(self) -> None:
        """Lengthens recordings whose overhead is too high, and stops watching if they cannot get longer."""
        self._recordings += 1
        self._held_s += self._gap_s
        # A mean over several recordings, because the machine may be busy during one.
        if self._recordings < _CHECKED_RECORDINGS:
            return
        share = self._held_s / self._watched_s if self._watched_s else 0.0
        self._recordings, self._held_s, self._watched_s = 0, 0.0, 0.0
        if share <= _MOST_SHARE:
            return
        if self._window_steps < _LONGEST_STEPS:
            # Twice as many steps share the cost of one recording.
            self._window_steps *= 2
            return
        warnings.warn(
            f"Slow steps are no longer watched for: to record them takes {share:.1%} of the steps' time, and at most "
            f"{_MOST_SHARE:.0%} is well spent. Capture some steps instead.",
            CaptureWarning,
            stacklevel=4,
        )
        self._give_up()

    def _give_up(self) -> None:
        import jax

        if not self._gives_up:
            jax.monitoring.unregister_event_duration_listener(self._hear)
        self._gives_up = True
        self._forget()
