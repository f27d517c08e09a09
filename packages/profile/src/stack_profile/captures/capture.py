"""Captures traces: records in memory, then encodes and writes on background threads."""

import collections
import contextlib
import json
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from stack_core.chips import machine
from stack_profile.captures.memory_snapshot import MemorySnapshot, note_snapshot, take_snapshot
from stack_profile.captures.processes import HEAP_SUFFIX, LIVE_SUFFIX, STACKS_SUFFIX, SUFFIX, stem
from stack_profile.captures.python_heap import PythonHeap
from stack_profile.captures.recording import Background, Recording, record
from stack_profile.captures.ring import Ring, replace_file
from stack_profile.captures.sources import source_digests
from stack_profile.captures.stacks import STACKS_HZ, StackSampler
from stack_profile.errors import CaptureError, CaptureWarning, ProfileError, TraceError
from stack_profile.traces.hlo import hlo_proto, outline, program_key
from stack_profile.traces.xplane import Plane, read_space

__all__ = ["Capture", "CaptureWarning", "capture", "capture_file", "environment"]


def capture(
    out: str | Path,
    *,
    name: str | None = None,
    process: int | None = None,
    host_tracer_level: int = 2,
    stacks_hz: float = STACKS_HZ,
    python_heap: bool = False,
) -> "Capture":
    """Captures what runs inside a `with` block, or in each call of a function that it decorates.

        with stack_profile.capture("out") as captured:
            train_step(state, batch)
        print(captured.wait())

    XProf finds the files at `out/plugins/profile/NAME/HOST.xplane.pb`. The Python function tracer is off, because it
    would cost 4% of a step and a quarter of the time of Python-heavy code.

    Args:
      out: directory of the captures, created if missing; existing captures are preserved.
      name: name of this capture, by default the time. Processes of one run use the same name and are read as one trace.
      process: index of this process in the run, by default JAX's.
      host_tracer_level: 1 records operations and annotations, 2 adds events of JAX's runtime, 3 adds their details.
      stacks_hz: how often to sample the Python stacks of all threads, per second; 0 for no samples. The rate falls if
        a sample takes over 125 µs of a processor, 0.25% at the default rate.
      python_heap: whether memray tracks the allocations of Python code, which slows it.

    Raises:
      CaptureError: `host_tracer_level` is unknown, `stacks_hz` is negative or over 1000, or `python_heap` needs memray,
        which is not installed.
    """
    return Capture(
        Path(out),
        name=name,
        process=process,
        host_tracer_level=host_tracer_level,
        stacks_hz=stacks_hz,
        python_heap=python_heap,
    )


class Capture(contextlib.ContextDecorator):
    """One capture; a process can run only one at a time, including JAX's own.

    Attributes:
      path: the trace's file, set when the capture starts; the file exists once `wait` returns.
      stop_s: seconds for which stopping blocked the program.
      cpu_s: processor time of sampling, encoding and writing, once the files are written.
    """

    def __init__(
        self,
        out: Path,
        *,
        name: str | None = None,
        process: int | None = None,
        host_tracer_level: int = 2,
        stacks_hz: float = STACKS_HZ,
        python_heap: bool = False,
        ring: Ring | None = None,
    ) -> None:
        if host_tracer_level not in (1, 2, 3):
            raise CaptureError(f"host_tracer_level is {host_tracer_level!r}; expected 1, 2 or 3.")
        self._arguments: dict[str, Any] = {
            "name": name,
            "process": process,
            "host_tracer_level": host_tracer_level,
            "stacks_hz": stacks_hz,
            "python_heap": python_heap,
            "ring": ring,
        }
        self._sampler = StackSampler(stacks_hz) if stacks_hz else None
        self._heap = PythonHeap() if python_heap else None
        self._snapshot: MemorySnapshot | None = None
        self._out = out
        self._recording: Recording | None = None
        self._writer: Background | None = None
        self._failure: str | None = None
        self._about: dict[str, Any] = {}
        self.path: Path | None = None
        self.stop_s = self.cpu_s = 0.0

    def start(self, recording: Recording | None = None, sampler: StackSampler | None = None) -> "Capture":
        """Starts the capture.

        Args:
          recording: a running recording to save, instead of a new one.
          sampler: the sampler that runs during this recording, if any.

        Raises:
          CaptureError: another capture is running, or the directory cannot be written.
        """
        mine = recording or record(host_tracer_level=self._arguments["host_tracer_level"])
        try:
            self.path = capture_file(self._out, self._arguments["name"], self._arguments["process"])
            if self._heap is not None:
                self._heap.start(self.path.with_name(f"{stem(self.path)}.heap.bin"))
        except BaseException:  # Release the profiler for the next capture after any error, including KeyboardInterrupt.
            mine.discard()
            raise
        self._about = {"started_at": datetime.now(UTC).isoformat()}
        self._recording = mine
        if recording is not None:
            self._sampler = sampler
        elif self._sampler is not None:
            self._sampler.start()
        return self

    def stop(
        self,
        *,
        settle: bool = True,
        error: BaseException | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Stops the capture; a thread encodes and writes it. Later calls do nothing.

        Args:
          settle: first wait for all live arrays, to include their computation in the trace, then until recording is
            off.
          error: error of the program. If a device is out of memory, the state of the memory is stored too, and standard
            error gets the command that shows it.
          about: extra metadata for readers; "partial" states why the trace is shorter than requested.
          on_written: callback of the writing thread, also after a failure.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._snapshot = take_snapshot(error)
        if self._snapshot is not None:
            about = {**about, "out_of_memory": self._snapshot.about}
        if settle:
            _settle()
        started_s = time.perf_counter()
        recording.end()
        if self._sampler is not None:
            self._sampler.stop()
        if self._heap is not None:
            self._heap.stop()
        if settle:
            recording.wait_until_off()
        # Without `_settle`, whose wait is the program's own work.
        self.stop_s = time.perf_counter() - started_s
        self._about |= {"stop_s": self.stop_s, **about}
        self._writer = Background(lambda: self._write(recording, on_written), "capture-writer")

    @property
    def is_running(self) -> bool:
        """True between `start` and `stop`."""
        return self._recording is not None

    @property
    def is_writing(self) -> bool:
        """True if the files are being written."""
        return self._writer is not None and self._writer.runs

    @property
    def failure(self) -> str | None:
        """Reason why the files could not be written; None while they are written, and after a success."""
        return self._failure

    def __repr__(self) -> str:
        state = "running" if self.is_running else "written" if self._writer is not None else "not started"
        state = "being written" if self.is_writing else state if self._failure is None else self._failure
        return f"<Capture {self.path or self._out}: {state}>"

    def wait(self) -> Path:
        """Blocks until the files are written, and returns the trace's file.

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
        # After an exception, arrays may never become ready.
        self.stop(settle=error is None, error=error)

    def _recreate_cm(self) -> "Capture":
        """Makes a new capture for each call of a decorated function."""
        return Capture(self._out, **self._arguments)

    def _write(self, recording: Recording, on_written: Callable[[], None]) -> None:
        try:
            data = recording.data()
            self._about |= {**environment(), "bytes": len(data)}
            self._write_files(data)
            if self._snapshot is not None and self.path is not None:
                note_snapshot(self.path)
        # This thread would lose the exception, so `wait` raises another one, and a warning shows the reason.
        except ProfileError as error:
            self._failure = str(error)
        except OSError as error:
            self._failure = f"The capture cannot be written: {error}. Free the disk, or name another directory."
        finally:
            if self._heap is not None:
                self._heap.close()
            self.cpu_s = time.thread_time() + recording.cpu_s + (self._sampler.cpu_s if self._sampler else 0.0)
            on_written()
        if self._failure is not None:
            warnings.warn(self._failure, CaptureWarning, stacklevel=2)

    def _write_files(self, data: bytes) -> None:
        import jax

        assert self.path is not None, "a capture that ended has started"
        client = jax.devices()[0].client
        # Not every client of PJRT lists its programs.
        programs = client.live_executables() if hasattr(client, "live_executables") else []
        name = stem(self.path)
        files = [(f"{name}.{program}.hlo.pb", proto) for program, proto in _missing_programs(data, programs)]
        if self._sampler is not None:
            files.append((f"{name}{STACKS_SUFFIX}", self._sampler.content()))
        if self._heap is not None:
            files.append((f"{name}{HEAP_SUFFIX}", self._heap.content()))
        if self._snapshot is not None:
            files.append((f"{name}{LIVE_SUFFIX}", self._snapshot.live))
        files.append((f"{name}.capture.json", json.dumps(self._about, indent=2).encode()))
        # Last, because readers look for the trace and then need the other files.
        files.append((self.path.name, data))
        if self._arguments["ring"] is not None:
            self._arguments["ring"].write(self.path.parent, files)
            return
        for file, content in files:
            replace_file(self.path.with_name(file), content)


def capture_file(out: Path, name: str | None, process: int | None) -> Path:
    """Creates the capture's folder, which processes share if they have one name, and returns the trace's file."""
    import jax

    runs = out / "plugins" / "profile"
    if process is None and jax.process_count() > 1:
        process = jax.process_index()
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = runs / (name or datetime.now().astimezone().strftime("%Y_%m_%d_%H_%M_%S_%f"))
        # An unnamed capture must get a new folder; processes of one run share a named one.
        folder.mkdir(exist_ok=name is not None)
    except OSError as error:
        raise CaptureError(f"The directory of the capture cannot be made: {error}. Name another.") from error
    return folder / f"{socket.gethostname()}{'' if process is None else f'_{process}'}{SUFFIX}"


def _settle() -> None:
    """Waits for every live array; errors are ignored here, and raised where the program uses the results."""
    import jax

    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # the computation failed, or the array was donated meanwhile
            array.block_until_ready()


def _missing_programs(data: bytes, programs: list[Any]) -> Iterator[tuple[str, bytes]]:
    """Yields name, such as `jit_step(7)`, and HLO of each program that ran but is missing from the trace."""
    planes = read_space(data).planes
    # The profiler stores programs as events of this plane.
    stored = [plane for plane in planes if plane.name == "/host:metadata"]
    held = {name for plane in stored for name in plane.event_names.values()}
    ran = {name.partition("(")[0] for plane in planes if plane.name != "/host:metadata" for name in _texts(plane)}
    renumbered: collections.Counter[object] | None = None
    for module in (module for executable in programs for module in executable.hlo_modules() if module.name in ran):
        proto = hlo_proto(module.as_serialized_hlo_module_proto())
        name = f"{module.name}({program_key(proto)})"
        if name in held:
            continue
        # On GPUs the trace numbers programs differently, but a program keeps its name and schedule.
        if renumbered is None:
            renumbered = collections.Counter(each for plane in stored for each in _schedules(plane))
        key = _schedule(proto)
        if not renumbered[key]:
            yield name, proto
        renumbered[key] -= 1


def _schedules(plane: Plane) -> Iterator[object]:
    for event in plane.event_names:
        proto = plane.event_stats(event).get("Hlo Proto")
        if isinstance(proto, bytes):
            yield _schedule(proto)


def _schedule(proto: bytes) -> object:
    """Returns the name of a module and its schedule, or something unique for a module without a schedule."""
    try:
        program = outline(proto, 0)
        schedule = program.schedule
    except TraceError:
        return object()
    return (program.name, frozenset(schedule.items())) if schedule else object()


def _texts(plane: Plane) -> Iterator[str]:
    """Yields the names of all events and statistics of a plane."""
    yield from plane.stat_names.values()
    yield from plane.event_names.values()


def environment() -> dict[str, Any]:
    """Returns the properties of this machine and process that analyses on another machine need."""
    import jax

    device, meshes = jax.devices()[0], _meshes()
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
        "directory": str(Path.cwd()),
        "sources": source_digests(),
        "meshes": [dict(shape) for shape in meshes],
        "mesh_processes": list(meshes.values()),
        "slice": getattr(jax.local_devices()[0], "slice_index", None),
        # The analysis `ops` uses this limit to find stacks that were cut off.
        "stack_frames": jax.config.values["jax_traceback_in_locations_limit"],
    }


def _meshes() -> Mapping[tuple[tuple[str, int], ...], list[int]]:
    """Returns the axes of the meshes of live arrays, the most frequent mesh first, with the process of each device."""
    import jax

    # Traces do not name the axes of a mesh, but arrays do.
    shardings = [array.sharding for array in jax.live_arrays()]
    meshes = [each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    counts = collections.Counter(tuple(mesh.shape.items()) for mesh in meshes)
    processes = {
        tuple(mesh.shape.items()): [device.process_index for device in mesh.devices.flat]
        for mesh in meshes
        if isinstance(mesh, jax.sharding.Mesh)
    }
    return {shape: processes.get(shape, []) for shape, _ in counts.most_common()}
