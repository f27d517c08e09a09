"""Traces, with operations joined to their programs and thereby to Python lines."""

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from stack_profile.captures.processes import (
    HEAP_SUFFIX,
    LIVE_SUFFIX,
    STACKS_SUFFIX,
    about_of,
    captured_programs,
    disjoint_reasons,
    incomplete_reasons,
    names_of,
    stem,
)
from stack_profile.errors import TraceError
from stack_profile.traces.hlo import Program, outline, program_key
from stack_profile.traces.host_stacks import CallingSamples, HostStacks, read_host_stacks
from stack_profile.traces.join import device_ops, executions, join
from stack_profile.traces.live_arrays import LiveArrays, read_live_arrays
from stack_profile.traces.meetings import Formation, HostClock
from stack_profile.traces.operations import HostEvents, Ops, Step, StepMarks, steps_of
from stack_profile.traces.python_heap import HeapPeak, read_python_heap
from stack_profile.traces.size_limit import check_size
from stack_profile.traces.wire import WireError
from stack_profile.traces.xplane import MISSING, Line, Space, read_space

__all__ = ["Trace", "capture_folders", "host_events_of", "is_jax_call", "load_trace", "trace_files", "trace_of"]


@dataclass(frozen=True, repr=False)
class Trace:
    """A capture of one or several processes.

    Attributes:
      source: path of the trace, or a description.
      spaces: the trace data of each process.
      about: metadata that the first process's capture wrote, see `stack_profile.capture`; empty for other tools'
        traces.
      programs: all loaded programs; their contents are read on first use.
      devices: devices on which operations ran.
      problems: reasons why the trace is incomplete; empty if it is complete.
      host_stacks: sampled Python stacks of each process, None for a process without samples.
      abouts: metadata of each process's capture, as `about`.
      clocks: clock of each process; the times of moved clocks are corrected already.
      heaps: Python heap of each process, None for a process whose heap was not tracked.
      live: arrays of each process when a device was out of memory, None without this error.
    """

    source: str
    spaces: tuple[Space, ...]
    about: Mapping[str, Any]
    programs: tuple[Program, ...]
    devices: tuple[Ops, ...]
    problems: tuple[str, ...]
    host_stacks: tuple[HostStacks | None, ...] = ()
    abouts: tuple[Mapping[str, Any], ...] = ()
    clocks: tuple[HostClock, ...] = ()
    heaps: tuple[HeapPeak | None, ...] = ()
    live: tuple[LiveArrays | None, ...] = ()

    def __repr__(self) -> str:
        operations = f"{sum(map(len, self.devices)):,} operations on {len(self.devices)} devices"
        counts = f"{operations}, {len(self.programs)} programs"
        return f"<Trace {'; '.join((f'{self.source}: {counts}', *self.problems))}>"

    def _repr_html_(self) -> str:
        """Shows the report in a notebook, in a frame of its own."""
        # By name, because the report is built from traces.
        return importlib.import_module("stack_profile.report.page").framed(self)

    @functools.cached_property
    def ran(self) -> tuple[Program, ...]:
        """Programs whose operations ran."""
        found = {id(each.program): each.program for ops in self.devices for each in ops.operations}
        return tuple(program for program in found.values() if program is not None)

    @functools.cached_property
    def base_ns(self) -> int:
        """Zero of the clock of operations and host events, on the trace's clock."""
        return _base_ns(self.spaces)

    @functools.cached_property
    def host_events(self) -> HostEvents:
        """Events of the threads that call JAX."""
        return host_events_of(self.spaces, self.base_ns)

    @functools.cached_property
    def calling_samples(self) -> tuple[CallingSamples, ...]:
        """Samples of the thread that calls JAX, of each process that has samples."""
        found = []
        for space, prefix, stacks in zip(self.spaces, names_of(self.spaces), self.host_stacks, strict=True):
            thread = stacks.calling(space) if stacks else None
            if stacks is not None and thread is not None:
                found.append(CallingSamples(prefix, stacks, thread))
        return tuple(found)

    @functools.cached_property
    def steps(self) -> Mapping[str, tuple[Step, ...]]:
        """Steps of each device by its name; empty if the trace does not distinguish the runs of programs."""
        found: dict[str, tuple[Step, ...]] = {}
        runs: dict[str, list[int | None]] = {}  # run number of each step, common to all hosts
        known: dict[int | None, int] = {}  # step number by run number
        for space, prefix, numbers in zip(self.spaces, names_of(self.spaces), self.formation.runs, strict=True):
            marks = _step_marks([space], self.base_ns)
            for ops in self.devices_of(prefix):
                found[ops.device] = steps = steps_of(ops, marks)
                runs[ops.device] = [numbers.get((step.program, step.run)) for step in steps]
                # Steps of a host without fitting annotations have the numbers 1, 2, ...
                if steps and steps[0].number != 1:
                    known |= zip(runs[ops.device], (step.number for step in steps), strict=True)
        known.pop(None, None)
        return {device: _numbered(steps, [known.get(run) for run in runs[device]]) for device, steps in found.items()}

    def devices_of(self, prefix: str) -> list[Ops]:
        """Returns the devices of one process; `prefix` starts their names."""
        return [ops for ops in self.devices if ops.device.startswith(prefix)]

    @functools.cached_property
    def formation(self) -> Formation:
        """The processes and the collectives between them, on one clock."""
        return Formation.of(self.devices, names_of(self.spaces), self.abouts)


def is_jax_call(name: str) -> bool:
    """Returns whether an event belongs to JAX or its runtime, by its name; others are annotations of the program."""
    return _JAX_CALL.match(name) is not None


def trace_files(path: Path) -> tuple[Path, ...]:
    """Returns the `*.xplane.pb` files of the newest capture under a directory, one per process, or the file itself.

    Raises:
      TraceError: the path does not exist or contains no capture, or the capture was deleted meanwhile.
    """
    if path.is_file():
        return (path,)
    folder = capture_folders(path)[0]
    # By number: process 10 is after process 2.
    files = tuple(sorted(folder.glob("*.xplane.pb"), key=_by_number))
    if not files:
        raise _deleted(folder)
    return files


def capture_folders(path: Path) -> tuple[Path, ...]:
    """Returns the folders with the captures under a directory, the newest first.

    Raises:
      TraceError: the path does not exist or contains no capture.
    """
    if not path.exists():
        raise TraceError(f"{str(path)!r} does not exist. Name a trace, or the directory of a capture.")
    found = (Path(folder) for folder, _, files in os.walk(path) if any(name.endswith(".xplane.pb") for name in files))
    times_ns = {}
    for folder in found:
        with contextlib.suppress(FileNotFoundError):  # a ring deletes its captures
            # By the folder, because processes write their files at different times.
            times_ns[folder] = folder.stat().st_mtime_ns
    if not times_ns:
        raise TraceError(
            f"{str(path)!r} holds no *.xplane.pb. Capture one: `stack profile run --out {path} script.py`, or "
            "`with stack_profile.capture(...)`."
        )
    return tuple(sorted(times_ns, key=lambda folder: times_ns[folder], reverse=True))


def _deleted(path: Path) -> TraceError:
    return TraceError(f"{str(path)!r} was deleted while it was read, as a ring does. Read the newest capture.")


def _by_number(file: Path) -> str:
    return re.sub(r"\d+", lambda digits: f"{digits[0]:0>9}", file.name)


def load_trace(path: Path | str) -> Trace:
    """Reads the newest capture under `path`, without writing anything there.

    Raises:
      TraceError: the capture does not exist, is not a trace, or may not fit the memory of this machine.
    """
    files = trace_files(Path(path))
    try:
        return _load_files(files)
    except FileNotFoundError as error:
        raise _deleted(Path(error.filename or files[0])) from error


def _load_files(files: Sequence[Path]) -> Trace:
    check_size(files)
    spaces, abouts = [read_space(file) for file in files], [about_of(file) for file in files]
    problems = list(incomplete_reasons(files, abouts))
    apart = list(disjoint_reasons(files, spaces))
    base_ns = _base_ns(spaces)
    stacks = [read_host_stacks(file.with_name(f"{stem(file)}{STACKS_SUFFIX}"), base_ns, problems) for file in files]
    heaps = [read_python_heap(file.with_name(f"{stem(file)}{HEAP_SUFFIX}"), problems) for file in files]
    live = [read_live_arrays(file.with_name(f"{stem(file)}{LIVE_SUFFIX}"), problems) for file in files]
    trace = trace_of(
        spaces,
        source=str(files[0] if len(files) == 1 else files[0].parent),
        about=abouts[0],
        extra_programs=[captured_programs(file) for file in files],
        problems=problems,
        host_stacks=stacks,
        abouts=abouts,
    )
    apart = list(disjoint_reasons(files, trace.spaces)) if apart else []
    return replace(trace, problems=(*apart, *trace.problems), heaps=tuple(heaps), live=tuple(live))


def trace_of(
    spaces: Sequence[Space],
    *,
    source: str = "memory",
    about: Mapping[str, Any] | None = None,
    extra_programs: Sequence[Sequence[bytes]] = (),
    problems: Sequence[str] = (),
    host_stacks: Sequence[HostStacks | None] = (),
    abouts: Sequence[Mapping[str, Any]] = (),
) -> Trace:
    """Joins the operations of the processes with their programs, and puts the processes on one clock.

    Args:
      spaces: trace data of each process.
      source: path of the trace, or a description.
      about: metadata of the capture.
      extra_programs: HloProtos of each process that the trace itself lacks.
      problems: known reasons why the trace is incomplete.
      host_stacks: sampled Python stacks of each process.
      abouts: metadata of each process's capture.
    """
    base_ns = _base_ns(spaces)
    found_problems = list(problems)
    programs: list[Program] = []
    devices: list[Ops] = []
    for space, prefix, protos in zip(spaces, names_of(spaces), extra_programs or [()] * len(spaces), strict=True):
        # Programs in the trace itself take precedence.
        found = _extra_programs(protos, found_problems) | _programs(space, found_problems)
        ran = [each for plane in space.planes if (each := executions(plane, base_ns)) is not None]
        kinds = [kind for each in ran for kind in each.kinds if not kind.beside]
        joined = join(kinds, found)
        # Hundreds of programs may be loaded, so only programs that may have run were read, and may turn out damaged.
        damaged = {key: each.damage for key, each in found.items() if "damage" in vars(each) and each.damage}
        found_problems += [f"{found[key].name}: {damage}" for key, damage in damaged.items()]
        found = {key: each for key, each in found.items() if key not in damaged}
        programs += found.values()
        devices += [ops for each in ran for ops in device_ops(each, joined, prefix)]
        found_problems += [*joined.problems(), *space.problems]
    stacks = tuple(host_stacks) or (None,) * len(spaces)
    columns = (tuple(spaces), about or {}, tuple(programs), tuple(devices), tuple(found_problems), stacks)
    trace = Trace(source, *columns, tuple(abouts))
    clocks = trace.formation.clocks
    if any(clock.is_moved for clock in clocks):
        return _on_one_clock(trace, clocks)
    return replace(trace, clocks=clocks)


def _on_one_clock(trace: Trace, clocks: Sequence[HostClock]) -> Trace:
    """Corrects the times of moved clocks."""
    before_ns = trace.base_ns
    processes = list(zip(trace.spaces, clocks, strict=True))
    spaces = [
        replace(space, planes=tuple(plane.shift(before_ns, clock.correction_ps) for plane in space.planes))
        for space, clock in processes
    ]
    # The earliest event, from which times count, may be another one.
    ahead_ps = (before_ns - _base_ns(spaces)) * 1000
    devices: list[Ops] = []
    stacks: list[HostStacks | None] = []
    for prefix, clock, sampled in zip(names_of(spaces), clocks, trace.host_stacks, strict=True):

        def corrected(time_ps: np.ndarray, clock: HostClock = clock) -> np.ndarray:
            return time_ps + clock.correction_ps(time_ps) + ahead_ps

        own = trace.devices_of(prefix)
        devices += [replace(ops, start_ps=corrected(ops.start_ps), end_ps=corrected(ops.end_ps)) for ops in own]
        stacks.append(sampled and sampled.at_times(corrected))
    moved = {"spaces": tuple(spaces), "devices": tuple(devices), "host_stacks": tuple(stacks)}
    return replace(trace, **moved, clocks=tuple(clocks))


_HLO_STAT: Final = "Hlo Proto"
_HOST_PLANE: Final = "/host:CPU"
_POOL_THREADS: Final = ("tf_",)
# Names of JAX's and its runtime's own events; all others are annotations of the program.
_JAX_CALL: Final = re.compile(
    r"PjitFunction|ParseArguments|\w+::|Pj[Rr]t|backend_compile|lower_|trace_to_|DevicePut|Transfer|BufferFromHost"
    r"|np\.asarray\(jax|shard_args|Compile|Handle inputs"
)


def _base_ns(spaces: Sequence[Space]) -> int:
    # Times count from here, since picoseconds since the epoch exceed 64 bits.
    return min((line.events.timestamp_ns for space in spaces for line in _lines(space)), default=0)


def host_events_of(spaces: Sequence[Space], base_ns: int) -> HostEvents:
    """Returns the events of the threads of some processes that call JAX, in picoseconds since `base_ns`."""
    names: dict[str, int] = {}
    columns = [np.zeros((3, 0), np.int64)]
    for plane in (plane for space in spaces for plane in space.planes if plane.name == _HOST_PLANE):
        for line in (line for line in plane.lines if not line.name.startswith(_POOL_THREADS)):
            kinds, inverse = np.unique(line.events.metadata, return_inverse=True)
            keys = [names.setdefault(plane.event_names.get(kind, ""), len(names)) for kind in kinds.tolist()]
            start = line.events.start_ps(base_ns)
            # An annotation of a step covers all idle time in the step, and would explain none.
            end = np.where(line.events.stats["step_num"] == MISSING, start + line.events.duration_ps, start)
            columns.append(np.stack([np.array(keys, np.int64)[inverse], start, end]))
    which, start, end = np.concatenate(columns, axis=1)
    keep = end > start  # drop marks without duration and annotations of steps
    is_call = np.array(list(map(is_jax_call, names)), bool)
    return HostEvents(tuple(names), which[keep], start[keep], end[keep], np.flatnonzero(is_call[which[keep]]))


def _numbered(steps: Sequence[Step], known: Sequence[int | None]) -> tuple[Step, ...]:
    """Renumbers consecutive steps by the steps of which another host knows the number."""
    shifts = [number - step.number for step, number in zip(steps, known, strict=True) if number is not None]
    shift = int(np.median(shifts)) if shifts else 0
    return tuple(replace(step, number=step.number + shift) for step in steps)


def _step_marks(spaces: Sequence[Space], base_ns: int) -> StepMarks:
    columns = [np.zeros((2, 0), np.int64)]
    for line in (line for space in spaces for line in _lines(space)):
        number = line.events.stats["step_num"]
        rows = np.flatnonzero(number != MISSING)
        columns.append(np.stack([line.events.start_ps(base_ns)[rows], number[rows]]))
    start, number = np.concatenate(columns, axis=1)
    order = np.argsort(start, kind="stable")
    return StepMarks(number[order], start[order])


def _lines(space: Space) -> Iterable[Line]:
    return (line for plane in space.planes for line in plane.lines if len(line.events))


def _programs(space: Space, damaged: list[str]) -> dict[int, Program]:
    """Returns the programs of a process by key, and adds damaged ones to `damaged`."""
    found: dict[int, Program] = {}
    for plane in space.planes:
        for event, name in plane.event_names.items() if plane.name == "/host:metadata" else ():
            stats = plane.event_stats(event)
            # The event's key is the number of the program unless a statistic states it.
            proto, key = stats.get(_HLO_STAT), stats.get("program_id", event)
            if isinstance(proto, bytes) and isinstance(key, int) and (program := _read(proto, key, name, damaged)):
                found[key] = program
    return found


def _extra_programs(protos: Sequence[bytes], damaged: list[str]) -> dict[int, Program]:
    """Returns programs by key, and adds damaged ones to `damaged`."""
    found = {}
    for proto in protos:
        try:
            key = program_key(proto)
        except WireError as error:
            damaged.append(f"A program stored with the trace is damaged: {error}")
        else:
            if program := _read(proto, key, f"program {key} stored with the trace", damaged):
                found[key] = program
    return found


def _read(proto: bytes, key: int, name: str, damaged: list[str]) -> Program | None:
    try:
        return outline(proto, key)
    except TraceError as error:
        damaged.append(f"{name}: {error}")
        return None
