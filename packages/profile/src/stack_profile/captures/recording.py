"""Access to JAX's profiler, a singleton that recordings acquire, may yield to others, and release."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stack_profile.errors import CaptureError

__all__ = ["Background", "Recording", "backend_started", "record"]

_POLL_S: Final = 0.0005
_LOWEST_PRIORITY: Final = 19


class Background:
    """Work on a non-daemon thread, or on the calling thread if the interpreter is shutting down."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name)
        try:
            self._thread.start()
        except RuntimeError:  # no new threads after the main thread has ended
            work()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        # Without an ident the work ran on the calling thread.
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def lower_priority(self) -> None:
        """Lowers the thread's priority in favour of the program; only Linux has priorities per thread."""
        if sys.platform == "linux" and self._thread.native_id is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)


@dataclass
class _Profiler:
    """Current owner of the profiler, guarded by the condition `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    recording: "Recording | None" = None

    def give_to(self, recording: "Recording | None") -> None:
        self.recording = recording
        self.changed.notify_all()


_profiler: Final = _Profiler()


class Recording:
    """Recording of this process in memory, until it is ended or discarded.

    Attributes:
      yields: True if the recording is discarded when another one needs the profiler.
      lost: True if the recording was discarded.
      ending: True if `end` was called.
      cpu_s: processor time of stopping and encoding, once `data` has returned.
    """

    def __init__(self, session: Any, *, yields: bool) -> None:
        self._session = session
        self._data: bytes | None = None
        self._error: RuntimeError | None = None
        self._stopping: Background | None = None
        self.yields = yields
        self.cpu_s = 0.0

    @property
    def lost(self) -> bool:
        return self._session is None

    @property
    def ending(self) -> bool:
        return self._stopping is not None

    def end(self) -> bool:
        """Starts to end the recording on a background thread; returns False if it was discarded."""
        with _profiler.changed:
            if self.lost:
                return False
            self._stopping = Background(self._stop, "capture-stop")
            return True

    def data(self) -> bytes:
        """Waits for the recorded data after `end` and returns it as a serialized XSpace.

        The encoding thread runs at low priority, and leaves the processors to the program.

        Raises:
          CaptureError: the recording was lost to another user of the profiler.
        """
        if self._stopping is None:
            raise CaptureError("The capture is empty: another capture used the profiler.")
        self.wait_until_off()
        # Not before: until recording is off, it slows the program down.
        self._stopping.lower_priority()
        self._stopping.join()
        if self._data is None:
            raise CaptureError(
                f"The capture is empty: {self._error} Meanwhile the profiler was in use, perhaps by "
                "jax.profiler.start_trace or a profiler server."
            ) from self._error
        return self._data

    def wait_until_off(self) -> None:
        """Waits until the profiler no longer records; `end` must have been called."""
        # Only this private module exposes whether recording is on.
        from jax._src.lib import _profiler as tracer

        assert self._stopping is not None, "a recording is ended before that is waited for"
        while tracer.TraceMe.is_enabled() and self._stopping.runs:
            self._stopping.join(_POLL_S)

    def discard(self) -> None:
        """Discards the recording without encoding; does nothing after `end`."""
        with _profiler.changed:
            if not self.ending and not self.lost:
                self._session = None  # the session's destructor stops the profiler
                _profiler.give_to(None)

    def _stop(self) -> None:
        try:
            self._data = self._session.stop()
        except RuntimeError as error:  # includes JaxRuntimeError
            # Kept for `data`, because this runs on a background thread.
            self._error = error
        finally:
            self.cpu_s = time.thread_time()  # of this thread, which does nothing else
            with _profiler.changed:
                _profiler.give_to(None)


def record(*, host_tracer_level: int, programs: bool = True, yields: bool = False) -> Recording:
    """Starts a recording.

    Args:
      host_tracer_level: see `stack_profile.capture`.
      programs: records the compiled programs; collecting them takes milliseconds at the end.
      yields: lets other recordings take the profiler. A yielding recording fails while another one is ending,
        instead of waiting.

    Raises:
      CaptureError: another recording is running, including JAX's own.
    """
    import jax
    from jax._src.lib import _profiler as tracer  # public APIs cannot stop into memory on every version

    jax.devices()  # start the backend first: one started later would not be recorded
    options = jax.profiler.ProfileOptions()
    # `capture` states the cost of the Python tracer.
    options.python_tracer_level = 0
    options.host_tracer_level = host_tracer_level
    options.enable_hlo_proto = programs
    with _profiler.changed:
        if not yields:
            _profiler.changed.wait_for(lambda: _profiler.recording is None or not _profiler.recording.ending)
        if _profiler.recording is not None and _profiler.recording.yields:
            _profiler.recording.discard()
        # Also enabled by jax.profiler.start_trace, of which `_profiler` is unaware.
        if _profiler.recording is not None or tracer.TraceMe.is_enabled():
            raise CaptureError(
                "Another capture is running in this process, and JAX has one profiler. End it first: leave its `with` "
                "block, or call jax.profiler.stop_trace()."
            )
        recording = Recording(tracer.ProfilerSession(options), yields=yields)
        _profiler.give_to(recording)
    return recording


def backend_started() -> bool:
    """Returns whether JAX is imported and has started a backend, without starting one."""
    # Looked up instead of imported, because a program that never uses JAX should not pay for the import.
    bridge = sys.modules.get("jax._src.xla_bridge")
    initialized = getattr(bridge, "backends_are_initialized", None)
    return initialized is not None and initialized()
