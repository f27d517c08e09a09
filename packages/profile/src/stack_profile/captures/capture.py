"""Captures traces: recorded in memory, encoded and written by threads of their own."""

import collections
import contextlib
import json
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from stack_core.chips import machine
from stack_profile.captures.processes import SUFFIX, stem
from stack_profile.captures.recording import Background, Recording, record
from stack_profile.errors import CaptureError, ProfileError
from stack_profile.traces.hlo import hlo_proto, program_key
from stack_profile.traces.xplane import Plane, read_space

__all__ = ["Capture", "CaptureWarning", "capture"]


class CaptureWarning(UserWarning):
    """A capture that ended could not be written."""


def capture(
    out: str | Path, *, name: str | None = None, process: int | None = None, host_tracer_level: int = 2
) -> "Capture":
    """Captures what runs inside a `with` block, or in each call of a function that it decorates.

        with stack_profile.capture("out") as captured:
            train_step(state, batch)
        print(captured.wait())

    The files lie where XProf looks for them: `out/plugins/profile/NAME/HOST.xplane.pb`. The tracer of Python functions
    is off: it would cost 4% of a step and a quarter of Python-heavy code.

    Args:
      out: created where it is missing; what is there stays.
      name: of this capture; the processes of one run give the same, and are read as one trace. By default the time.
      process: which of them this is, by default JAX's index of it.
      host_tracer_level: 1 keeps operations and annotations, 2 also what JAX's runtime does, 3 its details.
    """
    return Capture(Path(out), name=name, process=process, host_tracer_level=host_tracer_level)


class Capture(contextlib.ContextDecorator):
    """One capture; there can be one at a time in a process, JAX's own included.

    Attributes:
      path: the trace's file, known once the capture has started; it exists when `wait` returns.
      stop_s: how long the program was held up at the end.
    """

    def __init__(
        self, out: Path, *, name: str | None = None, process: int | None = None, host_tracer_level: int = 2
    ) -> None:
        self._arguments: dict[str, Any] = {"name": name, "process": process, "host_tracer_level": host_tracer_level}
        self._out = out
        self._recording: Recording | None = None
        self._writer: Background | None = None
        self._failure: str | None = None
        self._about: dict[str, Any] = {}
        self.path: Path | None = None
        self.stop_s = 0.0

    def start(self, recording: Recording | None = None) -> "Capture":
        """Begins to capture.

        Args:
          recording: one that runs already, to be kept.

        Raises:
          CaptureError: another capture is running, or the directory cannot be written.
        """
        mine = recording or record(host_tracer_level=self._arguments["host_tracer_level"])
        try:
            self.path = _file(self._out, self._arguments["name"], self._arguments["process"])
        except BaseException:  # Whatever went wrong, the next capture must find the profiler free.
            mine.discard()
            raise
        self._about = {"started_at": datetime.now(UTC).isoformat()}
        self._recording = mine
        return self

    def stop(self, *, settle: bool = True, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Ends the capture; a thread encodes and writes it. Calling it again does nothing.

        Args:
          settle: first wait for all arrays that are alive, so that their computation is in the trace, and then until
            nothing is recorded.
          about: more for its readers; "partial" says why the trace is not all of what was asked for.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if settle:
            _settle()
        started_s = time.perf_counter()
        recording.end()
        if settle:
            recording.wait_until_off()
        self.stop_s = time.perf_counter() - started_s
        self._about |= {"stop_s": self.stop_s, **about}
        self._writer = Background(lambda: self._write(recording), "capture-writer")

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

    def _write(self, recording: Recording) -> None:
        try:
            data = recording.data()
            self._about |= {**_environment(), "bytes": len(data)}
            self._write_files(data)
        except ProfileError as error:
            self._failure = str(error)
        except OSError as error:
            self._failure = f"The capture cannot be written: {error}. Free the disk, or name another directory."
        if self._failure is not None:
            warnings.warn(self._failure, CaptureWarning, stacklevel=2)

    def _write_files(self, data: bytes) -> None:
        import jax

        assert self.path is not None, "a capture that ended has started"
        client = jax.devices()[0].client
        programs = client.live_executables() if hasattr(client, "live_executables") else []
        for file, content in _missing_programs(data, programs):
            _replace(self.path.with_name(f"{stem(self.path)}.{file}.hlo.pb"), content)
        _replace(self.path.with_name(f"{stem(self.path)}.capture.json"), json.dumps(self._about, indent=2).encode())
        _replace(self.path, data)


def _file(out: Path, name: str | None, process: int | None) -> Path:
    """The trace's file in a folder of its own, which is made; processes of one run share it if they share a name."""
    import jax

    runs = out / "plugins" / "profile"
    if process is None and jax.process_count() > 1:
        process = jax.process_index()
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = runs / (name or datetime.now().astimezone().strftime("%Y_%m_%d_%H_%M_%S_%f"))
        folder.mkdir(exist_ok=name is not None)
    except OSError as error:
        raise CaptureError(f"The directory of the capture cannot be made: {error}. Name another.") from error
    return folder / f"{socket.gethostname()}{'' if process is None else f'_{process}'}{SUFFIX}"


def _settle() -> None:
    """Waits for every array that is alive; errors of the program are for those who use its results."""
    import jax

    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # a failed computation, or an array donated meanwhile
            array.block_until_ready()


def _missing_programs(data: bytes, programs: list[Any]) -> Iterator[tuple[str, bytes]]:
    """Name and HLO of the programs that ran in the trace and that it lacks, called `jit_step(7)` as in it."""
    planes = read_space(data).planes
    held = {name for plane in planes if plane.name == "/host:metadata" for name in plane.event_names.values()}
    ran = {name.partition("(")[0] for plane in planes if plane.name != "/host:metadata" for name in _texts(plane)}
    for module in (module for executable in programs for module in executable.hlo_modules() if module.name in ran):
        proto = hlo_proto(module.as_serialized_hlo_module_proto())
        name = f"{module.name}({program_key(proto)})"
        if name not in held:
            yield name, proto


def _texts(plane: Plane) -> Iterator[str]:
    """All that the events of a plane are called or say."""
    yield from plane.stat_names.values()
    yield from plane.event_names.values()


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
        "meshes": _meshes(),
        "stack_frames": jax.config.values["jax_traceback_in_locations_limit"],
    }


def _meshes() -> list[dict[str, int]]:
    """Axes and their sizes of the meshes that arrays are on, that of the most arrays first."""
    import jax

    shardings = [array.sharding for array in jax.live_arrays()]
    named = [each.mesh.shape for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    counts = collections.Counter(tuple(shape.items()) for shape in named)
    return [dict(shape) for shape, _ in counts.most_common()]


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole when it has its name."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
