"""The profiler of this process: JAX has one, so what records takes it, may have to hand it over, and gives it back."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stack_profile.errors import CaptureError

__all__ = ["Background", "Recording", "backend_started", "record"]

_POLL_S: Final = 0.0005
_LOWEST_PRIORITY: Final = 19


class Background:
    """Work on a thread of its own, which the interpreter waits for; on this one where the interpreter starts none."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name)
        try:
            self._thread.start()
        except RuntimeError:  # The main thread has ended.
            work()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def lower_priority(self) -> None:
        """Leaves the processors to the program; only Linux has priorities of threads."""
        if sys.platform == "linux" and self._thread.native_id is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)


@dataclass
class _Profiler:
    """Who has it; changed with the condition held."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    recording: "Recording | None" = None

    def give_to(self, recording: "Recording | None") -> None:
        self.recording = recording
        self.changed.notify_all()


_profiler: Final = _Profiler()


class Recording:
    """What runs in this process, kept in memory until it is ended or thrown away.

    Attributes:
      yields: it is thrown away when another wants the profiler.
      lost: it was.
    """

    def __init__(self, session: Any, *, yields: bool) -> None:
        self._session = session
        self._data: bytes | None = None
        self._error: RuntimeError | None = None
        self._stopping: Background | None = None
        self.yields = yields

    @property
    def lost(self) -> bool:
        return self._session is None

    @property
    def ending(self) -> bool:
        return self._stopping is not None

    def end(self) -> bool:
        """Begins to end it, on a thread of its own; False where it was lost."""
        with _profiler.changed:
            if self.lost:
                return False
            self._stopping = Background(self._stop, "capture-stop")
            return True

    def data(self) -> bytes:
        """Waits for what was recorded, as an XSpace, after `end`.

        The time to encode it is the processors' where nothing else wants them.

        Raises:
          CaptureError: the profiler was taken by something else.
        """
        if self._stopping is None:
            raise CaptureError("The capture holds nothing: another one took the profiler.")
        self.wait_until_off()
        self._stopping.lower_priority()
        self._stopping.join()
        if self._data is None:
            raise CaptureError(
                f"The capture holds nothing: {self._error} While it ran, the profiler was another's, perhaps that of "
                "jax.profiler.start_trace or of a profiler server."
            ) from self._error
        return self._data

    def wait_until_off(self) -> None:
        """Waits until nothing that runs from now on is recorded; `end` was called."""
        from jax._src.lib import _profiler as tracer

        assert self._stopping is not None, "a recording is ended before that is waited for"
        while tracer.TraceMe.is_enabled() and self._stopping.runs:
            self._stopping.join(_POLL_S)

    def discard(self) -> None:
        """Throws it away, without encoding it; one that is ending ends."""
        with _profiler.changed:
            if not self.ending and not self.lost:
                self._session = None  # Its destructor ends it.
                _profiler.give_to(None)

    def _stop(self) -> None:
        try:
            self._data = self._session.stop()
        except RuntimeError as error:  # JaxRuntimeError among them
            self._error = error
        finally:
            with _profiler.changed:
                _profiler.give_to(None)


def record(*, host_tracer_level: int, programs: bool = True, yields: bool = False) -> Recording:
    """Starts to record.

    Args:
      host_tracer_level: see `stack_profile.capture`.
      programs: whether the recording holds the compiled programs; to collect them takes milliseconds at its end.
      yields: whether another may take the profiler from it; it does not wait for one that ends, either.

    Raises:
      CaptureError: another recording is running, JAX's own included.
    """
    import jax
    from jax._src.lib import _profiler as tracer  # none of the public ways stops in memory on every version

    jax.devices()  # a backend that starts later would not be recorded
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = host_tracer_level
    options.enable_hlo_proto = programs
    with _profiler.changed:
        if not yields:
            _profiler.changed.wait_for(lambda: _profiler.recording is None or not _profiler.recording.ending)
        if _profiler.recording is not None and _profiler.recording.yields:
            _profiler.recording.discard()
        if _profiler.recording is not None or tracer.TraceMe.is_enabled():
            raise CaptureError(
                "Another capture is running in this process, and JAX has one profiler. End it first: leave its `with` "
                "block, or call jax.profiler.stop_trace()."
            )
        recording = Recording(tracer.ProfilerSession(options), yields=yields)
        _profiler.give_to(recording)
    return recording


def backend_started() -> bool:
    """Whether JAX is imported and has started a backend; asking starts none."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    initialized = getattr(bridge, "backends_are_initialized", None)
    return initialized is not None and initialized()
