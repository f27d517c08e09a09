"""Saves the traces of anomalously slow steps by recording all steps and discarding the normal ones.

Recordings stay in memory, without the compiled programs. Discarding one every few steps costs a fraction of a
millisecond; encoding costs ten times as much and is done only for slow steps and, in the continuous mode, for some
normal ones. A requested capture takes the profiler and interrupts watching.

The time that recordings take is measured. After each recording, watching pauses until that time is at most 1% of the
time since the recording began. On an idle machine with 2 cores, a step of 50 ms with 1,200 events needs no pause.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Hashable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from stack_profile.captures.capture import Capture, CaptureWarning
from stack_profile.captures.out_of_memory import save_out_of_memory
from stack_profile.captures.recording import Recording, record
from stack_profile.captures.ring import ContinuousConfig, Ring
from stack_profile.captures.slow_steps import AnomalyConfig, SlowSteps
from stack_profile.captures.stacks import StackSampler
from stack_profile.errors import CaptureError

__all__ = ["Watch"]

_WINDOW_STEPS, _WINDOW_S = 8, 0.4  # minimum steps and seconds of a recording
_FIRST_WINDOW_S, _LEAST_WINDOW_S = 0.1, 0.02  # length of a ring's recordings before the cost is measured, and least
_STEPS_AFTER: Final = 2  # steps that are recorded after a slow one
_IDLE_S: Final = 30.0  # a recording of a server without requests ends after this time
_FIRST_S: Final = 10.0  # until the first capture of normal steps, while programs are compiled and caches fill
_RETRY_S: Final = 600.0  # pause of the ring after a capture that could not be written
_CHECKED_WINDOWS, _LEAST_RECORDED = 8, 0.2
# To record an event takes 27 ns, and to discard it 300 ns, which are measured.
_RECORDING: Final = 1.1
_COMPILED: Final = "/jax/core/compile/backend_compile_duration"


class Watch:
    """Watches a loop and saves the traces of anomalously slow steps.

        with stack_profile.Watch("out") as watch:
            for batch in batches:
                with watch.step():
                    state = jax.block_until_ready(train_step(state, batch))

    Steps with a compilation are ignored; `stack profile compile` reports compilations. In the continuous mode, captures
    of normal steps are saved as well, in a ring of limited size on disk.

    Attributes:
      captures: saved traces of slow steps, named `slow_step_N`; each also has some steps before and two after it.
      cost_s: processor time taken so far.
      watched_s, recorded_s: total time, and the part of it in which a recording ran.
    """

    def __init__(
        self,
        out: str | Path,
        settings: AnomalyConfig | None = None,
        *,
        continuous: ContinuousConfig | None = None,
        runs_ahead: bool = False,
        timed: bool = False,
    ) -> None:
        """Starts watching.

        Args:
          out: directory of the captures.
          settings: definition of slow steps, by default `AnomalyConfig()`.
          continuous: settings of the continuous mode; None saves slow steps only.
          runs_ahead: True if the device has already begun the next step when a step is reported.
          timed: True if `tick` reports the time, and steps are reported during recordings only.

        Raises:
          CaptureError: the ring of the continuous mode cannot be written, or has another writer.
        """
        settings = settings or AnomalyConfig()
        self._out, self._runs_ahead, self._timed, self._continuous = Path(out), runs_ahead, timed, continuous
        self._ring = Ring(self._out, continuous.ring_mb, settings.captures) if continuous else None
        self._share = (continuous or ContinuousConfig()).share
        self._slow = SlowSteps(settings)
        self._lock = threading.RLock()  # threads that write captures report their cost
        self._recording: Recording | None = None
        self._sampler: StackSampler | None = None
        self._is_normal = False  # True saves the recording in the ring
        self._first_step, self._last_step, self._steps, self._windows = 0, 0, 0, 0
        self._slow_step: dict[str, Any] | None = None  # recorded, and saved after `_steps_left` further steps
        self._steps_left = self._writing = 0
        self._normal_s = _FIRST_WINDOW_S
        self._compiled = self._listens = self._closed = self._warned = False
        self._window_s = self._gap_s = self._pause_s = self._paused_s = 0.0
        self._until_normal_s = min(continuous.every_s, _FIRST_S) if continuous else 0.0
        self.cost_s = self.watched_s = self.recorded_s = 0.0
        self.captures: list[Capture] = []
        self._normal: list[Capture] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Times one step, which must finish inside the block.

        If it fails because a device is out of memory, the state of the memory is stored as a capture.
        """
        started_s = time.perf_counter()
        try:
            yield
        except Exception as error:  # JAX has no error class for a full memory
            save_out_of_memory(self._out, error)
            raise
        self.finished(self._last_step + 1, time.perf_counter() - started_s)

    def finished(self, step: int, duration_s: float, *, kind: Hashable = None) -> None:
        """Reports a finished step.

        Args:
          step: number of the step, which names its trace.
          duration_s: duration of the step.
          kind: kind of the step; a step is slow in comparison with others of its kind.
        """
        with self._lock:
            if not self._timed:
                self._pass(duration_s)
            self._judge(step, duration_s, kind)
            if self._is_over():
                self._renew()

    def tick(self, elapsed_s: float) -> None:
        """Reports that time has passed; only for watches that are `timed`."""
        with self._lock:
            self._pass(elapsed_s)
            # A recording ends with a step, since a slow step may be running. Without steps it ends here.
            longest_s = _IDLE_S if self._last_step else self._normal_s
            if self._is_lost() or (not self._steps and self._window_s >= longest_s):
                self._renew()

    def close(self) -> None:
        """Stops watching, and waits until saved traces are written. Later calls do nothing."""
        import jax

        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._listens:
                jax.monitoring.unregister_event_duration_listener(self._note_compilation)
            if self._slow_step is not None:
                self._save_slow_step()
            self._forget()
        for captured in (*self.captures, *self._normal):
            with contextlib.suppress(CaptureError):  # the writer has already warned
                captured.wait()
        if self._ring is not None:
            self._ring.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _note_compilation(self, event: str, duration_secs: float, **about: Any) -> None:
        self._compiled |= event == _COMPILED

    def _pass(self, seconds: float) -> None:
        import jax

        if not self._listens and not self._closed:
            # Not in the constructor: a program may configure JAX before the import.
            self._listens = True
            jax.monitoring.register_event_duration_secs_listener(self._note_compilation)
        self.watched_s += seconds
        self._until_normal_s = max(self._until_normal_s - seconds, 0.0)
        if self._is_lost():
            self._paused_s += min(self._pause_s, seconds)
            self._pause_s = max(self._pause_s - seconds, 0.0)
        else:
            self._window_s += seconds
            self.recorded_s += seconds

    def _judge(self, step: int, duration_s: float, kind: Hashable) -> None:
        self._last_step = step
        self._steps += 1
        compiled, self._compiled = self._compiled, False
        if self._slow_step is not None:
            self._steps_left -= 1
        threshold_s = None
        if not compiled:
            recorded = self._slow_step is None and not self._is_lost()
            threshold_s = self._slow.exceeded_s(duration_s, kind=kind, recorded=recorded)
        if threshold_s is not None:
            self._slow_step = {"slow_step": {"step": step, "duration_s": duration_s, "threshold_s": threshold_s}}
            self._steps_left = _STEPS_AFTER
            if self._runs_ahead and step == self._first_step:
                self._slow_step["partial"] = f"the first {1e3 * self._gap_s:.2g} ms of step {step} are missing"

    def _is_lost(self) -> bool:
        """Returns whether no recording runs: in a pause, or after another capture has taken the profiler."""
        return self._recording is None or self._recording.lost

    def _is_over(self) -> bool:
        """Returns whether the recording should end with this step."""
        if self._is_lost():
            return True
        if self._slow_step is not None:
            return self._steps_left <= 0
        if not self._is_normal and not self._awaits_slow_steps():
            return True
        return self._steps >= _WINDOW_STEPS and self._window_s >= (self._normal_s if self._is_normal else _WINDOW_S)

    def _awaits_slow_steps(self) -> bool:
        """Returns whether the next step can be judged, or its duration is only known if it is recorded."""
        if self._timed:
            return self._last_step > 0 and self._slow.captures_left > 0
        return self._slow.is_armed

    def _renew(self) -> None:
        """Ends the recording, and starts the next one unless there is a pause."""
        if self._recording is not None:
            # Processor time: on a busy machine, most of the wall time belongs to other threads.
            started_s = time.thread_time()
            self._end()
            self._charge(_RECORDING * (time.thread_time() - started_s))
            self._pause_s = max(self._pause_s - self._window_s, 0.0)
            self._window_s, self._steps = 0.0, 0
        # The cost of a capture is known once it is written, and its encoding would slow the recorded steps down.
        if self._closed or self._pause_s > 0 or self._writing:
            return
        self._is_normal = self._continuous is not None and self._until_normal_s == 0
        if not self._is_normal and not self._awaits_slow_steps():
            return
        started_s, used_s = time.perf_counter(), time.thread_time()
        try:
            self._recording = record(host_tracer_level=2, programs=False, yields=True)
        except CaptureError:  # another capture is running; the next step tries again
            return
        if self._is_normal and self._continuous is not None and self._continuous.stacks_hz:
            self._sampler = StackSampler(self._continuous.stacks_hz)
            self._sampler.start()
        self._first_step = self._last_step + 1
        # If the device runs ahead, this much of the next step is not recorded.
        self._gap_s = time.perf_counter() - started_s
        self._charge(time.thread_time() - used_s)
        self._windows += 1
        self._warn_of_pauses()

    def _end(self) -> None:
        if self._slow_step is not None:
            self._save_slow_step()
        elif self._is_normal and not self._is_lost():
            self._save_normal()
        else:
            self._forget()

    def _charge(self, cost_s: float) -> None:
        """Lengthens the next pause by the time that a cost needs to be within the share."""
        self.cost_s += cost_s
        self._pause_s += cost_s / self._share

    def _forget(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.discard()
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            self._charge(sampler.cpu_s)

    def _save_slow_step(self) -> None:
        about, self._slow_step = self._slow_step, None
        assert about is not None
        step = about["slow_step"]["step"]
        # Numbers of steps that are not a run's begin anew with each process.
        label = datetime.now(UTC).strftime("%Y_%m_%d_%H_%M_%S_%f") if self._timed else str(step)
        captured = self._save(f"slow_step_{label}", about, f"The trace of the slow step {step} is lost")
        if captured is not None:
            self.captures.append(captured)

    def _save_normal(self) -> None:
        assert self._ring is not None and self._continuous is not None
        self._until_normal_s = self._continuous.every_s
        captured = self._save(self._ring.new_name(), {}, "A capture of normal steps is lost")
        if captured is not None:
            self._normal = [each for each in self._normal if each.is_writing]
            self._normal.append(captured)

    def _save(self, name: str, about: dict[str, Any], lost: str) -> Capture | None:
        recording, self._recording = self._recording, None
        sampler, self._sampler = self._sampler, None
        if recording is None or recording.lost:  # another capture has taken the profiler
            self._sampler = sampler
            self._forget()
            return None
        if self._continuous is not None:
            figures = {"cost_s": self.cost_s, "watched_s": self.watched_s, "recorded_s": self.recorded_s}
            about = {**about, "continuous": {**figures, "ring_mb": self._continuous.ring_mb}}
        captured = Capture(self._out, name=name, ring=self._ring)
        try:
            captured.start(recording, sampler)
        except CaptureError as error:
            warnings.warn(f"{lost}: {error}", CaptureWarning, stacklevel=5)
            return None
        self._writing += 1
        captured.stop(settle=False, about=about, on_written=partial(self._written, captured, name, self._window_s))
        return captured

    def _written(self, captured: Capture, name: str, window_s: float) -> None:
        """Charges the cost of a written capture; called by its writer thread."""
        with self._lock:
            self._writing -= 1
            self._charge(captured.cpu_s)
            if self._continuous is not None and captured.cpu_s and window_s:
                # Half of the permitted time for captures of normal steps, and half for finding slow ones.
                affordable_s = self._share * self._continuous.every_s / 2 * window_s / captured.cpu_s
                self._normal_s = min(max(affordable_s, _LEAST_WINDOW_S), _WINDOW_S)
            if captured.failure is not None:
                self._until_normal_s = max(self._until_normal_s, _RETRY_S)
            elif self._ring is not None and name.startswith("slow") and captured.path is not None:
                self._ring.keep_before(captured.path.parent)

    def _warn_of_pauses(self) -> None:
        recorded_share = 1 - self._paused_s / self.watched_s
        if self._windows >= _CHECKED_WINDOWS and recorded_share < _LEAST_RECORDED and not self._warned:
            self._warned = True
            warnings.warn(
                f"Slow steps are only found in {recorded_share:.0%} of the time: to record all steps would take more "
                f"than {self._share:.1%} of a processor, because they have many events.",
                CaptureWarning,
                stacklevel=4,
            )
