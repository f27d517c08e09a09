"""Keeps the traces of anomalously slow steps, whole, by recording all steps and forgetting those that are not.

The recording is in memory, without the compiled programs, and is thrown away every few steps, which costs a fraction of
a millisecond; to encode it would cost ten times that, and happens for what is kept alone. A capture that is asked for
takes the profiler away meanwhile. Where it costs too much to start and to throw away, fewer and longer recordings are
made; where that does not help, none, with a warning.
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

_SHORTEST_STEPS, _LONGEST_STEPS = 8, 64  # of a recording
_MOST_SHARE: Final = 0.01  # of the time of steps, to start and to throw away recordings
_CHECKED_RECORDINGS: Final = 8
_COMPILED: Final = "/jax/core/compile/backend_compile_duration"


class Watch:
    """Watches a loop, and keeps the trace of a step that is anomalously slow.

        with stack_profile.Watch("out") as watch:
            for batch in batches:
                with watch.step():
                    state = jax.block_until_ready(train_step(state, batch))

    A step in which something was compiled is neither judged nor compared with: `stack profile compile` tells of these.

    Attributes:
      captures: the traces that were kept, `slow_step_N` each; of the last steps before it, too.
    """

    def __init__(self, out: str | Path, settings: AnomalyConfig | None = None, *, runs_ahead: bool = False) -> None:
        """Begins to watch.

        Args:
          runs_ahead: the device has begun a step when the one before is reported.
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
        """One step, which has ended when the block has."""
        started_s = time.perf_counter()
        yield
        self.finished(self._last_step + 1, time.perf_counter() - started_s)

    def finished(self, step: int, duration_s: float) -> None:
        """A step has ended; the number is that by which its trace is called."""
        self._last_step = step
        self._watched_s += duration_s if self._recording is not None else 0.0
        compiled, self._compiled = self._compiled, False
        threshold_s = None if compiled else self._slow.exceeded_s(duration_s)
        if threshold_s is not None:
            self._keep(step, {"step": step, "duration_s": duration_s, "threshold_s": threshold_s})
        lost = self._recording is None or self._recording.lost
        if lost or not self._slow.is_armed or step + 1 - self._first_step >= self._window_steps:
            self._renew(step + 1)

    def close(self) -> None:
        """Ends to watch, once what was kept is written. Calling it again does nothing."""
        self._give_up()
        for captured in self.captures:
            with contextlib.suppress(CaptureError):  # its writer has warned of it
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
            return  # another capture has it, or has taken the profiler
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
        """Throws a recording away and starts another, if it can have a use."""
        started_s = time.perf_counter()
        self._forget()
        if self._slow.is_armed and not self._gives_up:
            with contextlib.suppress(CaptureError):  # another capture is running; when it has ended there is a step
                self._recording = record(host_tracer_level=2, programs=False, yields=True)
            self._first_step = next_step
            self._gap_s = time.perf_counter() - started_s
            self._account()

    def _forget(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.discard()

    def _account(self) -> None:
        """Makes recordings longer where they cost too much."""
        self._recordings += 1
        self._held_s += self._gap_s
        if self._recordings < _CHECKED_RECORDINGS:
            return
        share = self._held_s / self._watched_s if self._watched_s else 0.0
        self._recordings, self._held_s, self._watched_s = 0, 0.0, 0.0
        if share <= _MOST_SHARE:
            return
        if self._window_steps < _LONGEST_STEPS:
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
