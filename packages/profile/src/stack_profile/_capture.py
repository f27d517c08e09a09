"""Captures traces: started and stopped in memory, written by a thread of their own."""

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from stack_core import machine
from stack_profile.errors import CaptureError
from stack_profile.hlo import hlo_proto

__all__ = ["Capture", "CaptureWarning", "capture"]

_active = threading.Lock()


class CaptureWarning(UserWarning):
    """A capture that ended could not be written."""


def capture(out: str | Path, *, name: str | None = None, host_tracer_level: int = 2) -> "Capture":
    """Captures what runs inside a `with` block, or in each call of a function that it decorates.

        with stack_profile.capture("out") as captured:
            train_step(state, batch)
        print(captured.wait())

    The files lie where XProf looks for them: `out/plugins/profile/NAME/HOST.xplane.pb`. The tracer of Python functions
    is off: it would cost 4% of a step and a quarter of Python-heavy code.

    Args:
      out: created where it is missing; what is there stays.
      name: of this capture; the processes of one run give the same. By default the time.
      host_tracer_level: 1 keeps operations and annotations, 2 also what JAX's runtime does, 3 its details.
    """
    return Capture(Path(out), name=name, host_tracer_level=host_tracer_level)


class Capture(contextlib.ContextDecorator):
    """One capture; there can be one at a time in a process, JAX's own included.

    Attributes:
      path: the trace's file, known once the capture has started; it exists when `wait` returns.
      stop_s: how long the program was held up at the end.
    """

    def __init__(self, out: Path, *, name: str | None, host_tracer_level: int) -> None:
        self._arguments: dict[str, Any] = {"name": name, "host_tracer_level": host_tracer_level}
        self._out = out
        self._session: Any = None
        self._writer: threading.Thread | None = None
        self._failure: str | None = None
        self._started_at = ""
        self.path: Path | None = None
        self.stop_s = 0.0

    def start(self) -> "Capture":
        """Begins to capture.

        Raises:
          CaptureError: another capture is running, or the directory cannot be written.
        """
        import jax
        from jax._src.lib import _profiler  # none of the public ways stops in memory on every version

        if _jax_captures() or not _active.acquire(blocking=False):
            raise CaptureError(
                "Another capture is running in this process, and JAX has one profiler. End it first: leave its `with` "
                "block, or call jax.profiler.stop_trace()."
            )
        try:
            jax.devices()  # a backend that starts later would not be captured
            self.path = _file(self._out, self._arguments["name"])
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            options.host_tracer_level = self._arguments["host_tracer_level"]
            self._started_at = datetime.now(UTC).isoformat()
            self._session = _profiler.ProfilerSession(options)
        except BaseException:  # Whatever went wrong, the next capture must find the profiler free.
            _active.release()
            raise
        return self

    def stop(self, *, settle: bool = True) -> None:
        """Ends the capture; a thread writes it. Calling it again does nothing.

        Args:
          settle: first wait for what was dispatched, so that it is in the trace.

        Raises:
          CaptureError: the profiler had been taken by something else.
        """
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if settle:
                _settle()
            started_s = time.perf_counter()
            data = session.stop()
            self.stop_s = time.perf_counter() - started_s
        except RuntimeError as error:  # JaxRuntimeError among them
            raise CaptureError(
                f"The capture holds nothing: {error} While it ran, the profiler was another's, perhaps that of "
                "jax.profiler.start_trace or of a profiler server."
            ) from error
        finally:
            _active.release()
        self._write(data)

    def wait(self) -> Path:
        """Blocks until the files are written; returns the trace's.

        Raises:
          CaptureError: nothing was captured, or it could not be written.
        """
        if self._writer is None or self.path is None:
            raise CaptureError("This capture has not ended: leave its `with` block, or call stop(), before wait().")
        self._writer.join()
        if self._failure is not None:
            raise CaptureError(self._failure)
        return self.path

    def __enter__(self) -> "Capture":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(settle=error is None)

    def _recreate_cm(self) -> "Capture":
        """Each call of a decorated function is a capture of its own."""
        return Capture(self._out, **self._arguments)

    def _write(self, data: bytes) -> None:
        import jax

        about = {**_environment(), "started_at": self._started_at, "stop_s": self.stop_s, "bytes": len(data)}
        client = jax.devices()[0].client
        programs = client.live_executables() if hasattr(client, "live_executables") else []
        # No daemon: a script that ends right after its capture waits for the files.
        self._writer = threading.Thread(target=self._write_files, args=(data, about, programs), name="capture-writer")
        self._writer.start()

    def _write_files(self, data: bytes, about: Mapping[str, Any], programs: list[Any]) -> None:
        assert self.path is not None, "a capture that ended has started"
        try:
            for file, content in _missing_programs(data, programs):
                _replace(self.path.with_name(f"{_stem(self.path)}.{file}.hlo.pb"), content)
            _replace(self.path.with_name(f"{_stem(self.path)}.capture.json"), json.dumps(about, indent=2).encode())
            _replace(self.path, data)
        except OSError as error:
            self._failure = f"The capture cannot be written: {error}. Free the disk, or name another directory."
            warnings.warn(self._failure, CaptureWarning, stacklevel=2)


_SUFFIX: Final = ".xplane.pb"


def _stem(path: Path) -> str:
    return path.name.removesuffix(_SUFFIX)


def _file(out: Path, name: str | None) -> Path:
    """The trace's file in a folder of its own, which is made; processes of one run share it if they share a name."""
    import jax

    runs = out / "plugins" / "profile"
    process = f"_{jax.process_index()}" if jax.process_count() > 1 else ""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = runs / (name or datetime.now().astimezone().strftime("%Y_%m_%d_%H_%M_%S_%f"))
        folder.mkdir(exist_ok=name is not None)
    except OSError as error:
        raise CaptureError(f"The directory of the capture cannot be made: {error}. Name another.") from error
    return folder / f"{socket.gethostname()}{process}{_SUFFIX}"


def _jax_captures() -> bool:
    """Whether jax.profiler.start_trace has started one; the profiler itself says so only when it is stopped."""
    from jax._src import profiler

    state = getattr(profiler, "_profile_state", None)
    return any(getattr(state, name, None) is not None for name in ("session", "profile_session"))


def _settle() -> None:
    """Waits for everything that was dispatched; errors of the program are for those who use its results."""
    import jax

    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # a failed computation, or an array donated meanwhile
            array.block_until_ready()


def _missing_programs(data: bytes, programs: list[Any]) -> Iterator[tuple[str, bytes]]:
    """Name and HLO of the programs that are loaded and not in the trace."""
    written = set()
    for executable in programs:
        for module in executable.hlo_modules():
            if module.name not in written and f"{module.name}(".encode() not in data:
                written.add(module.name)
                yield module.name, hlo_proto(module.as_serialized_hlo_module_proto())


def _environment() -> dict[str, Any]:
    """What an analysis on another machine needs to know of this one."""
    import jax

    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "process": [jax.process_index(), jax.process_count()],
        "pid": os.getpid(),
        "command": sys.argv,
    }


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole when it has its name."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
