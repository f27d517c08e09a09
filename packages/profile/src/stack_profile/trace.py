"""A trace with its operations joined to the programs, and so to the Python lines, that they come from."""

import collections
import functools
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from stack_profile.errors import TraceError
from stack_profile.hlo import CONTAINERS, Instruction, Program, read_program
from stack_profile.timeline import nesting, self_times, union
from stack_profile.xplane import MISSING, Line, Plane, Space, read_space

__all__ = ["PICOSECOND", "HostEvents", "Operation", "Ops", "Step", "Trace", "load_trace", "trace_files", "trace_of"]


PICOSECOND: Final = 1e-12


@dataclass(frozen=True)
class Operation:
    """An instruction of a program, as often as it ran.

    Attributes:
      module: the program's name as the events have it.
      instruction: None where the trace does not hold the program, or the program no such instruction.
    """

    name: str
    module: str
    program_key: int
    program: Program | None
    instruction: Instruction | None

    @property
    def opcode(self) -> str:
        return self.instruction.opcode if self.instruction else self.name.rstrip("0123456789").rstrip(".")

    @property
    def runs_others(self) -> bool:
        return self.opcode in CONTAINERS


@dataclass(frozen=True)
class Ops:
    """The executions of operations on one device, a row each, in the order of their start.

    Attributes:
      which: the row of `operations`.
      start_ps, end_ps: since the start of the trace. The end is that of the work, which on CPUs may come long after
        that of the event which started it.
      self_ps: the share in the union of all, see `stack_profile.timeline`.
      run: which execution of its program; `MISSING` where the trace does not say.
    """

    device: str
    operations: tuple[Operation, ...]
    which: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    self_ps: np.ndarray
    run: np.ndarray

    def __len__(self) -> int:
        return len(self.which)

    @functools.cached_property
    def covered(self) -> np.ndarray:
        """When any operation ran, as disjoint rows (start, end)."""
        return union(self.start_ps, self.end_ps)

    @property
    def union_ps(self) -> int:
        return int(np.sum(self.covered[:, 1] - self.covered[:, 0]))

    @property
    def busy_s(self) -> float:
        """The time in which any operation ran."""
        return self.union_ps * PICOSECOND

    def totals(self) -> Iterator[tuple[Operation, float, int]]:
        """Each operation with the seconds of its self time and the number of its executions."""
        counts = np.bincount(self.which, minlength=len(self.operations))
        yield from zip(self.operations, (self.sums(self.self_ps) * PICOSECOND).tolist(), counts.tolist(), strict=True)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of a column for each of the operations."""
        return np.bincount(self.which, weights=values, minlength=len(self.operations))


@dataclass(frozen=True)
class Step:
    """One execution of the program that took the most time on a device; until the next one starts, its step lasts.

    Attributes:
      end_ps: the start of the next one; the last step ends with its last operation.
    """

    program: str
    run: int
    start_ps: int
    end_ps: int

    @property
    def duration_ps(self) -> int:
        return self.end_ps - self.start_ps


@dataclass(frozen=True)
class HostEvents:
    """What the threads of the hosts did, operations of devices and the runtime's own marks left out.

    Attributes:
      which: the row of `names`.
      jax_calls: the rows that are calls of JAX's own; the others are a program's annotations.
    """

    names: tuple[str, ...]
    which: np.ndarray
    start_ps: np.ndarray
    end_ps: np.ndarray
    jax_calls: np.ndarray


@dataclass(frozen=True)
class Trace:
    """What was captured, of all processes.

    Attributes:
      about: what the capture wrote of its process, see `stack_profile.capture`; empty for other tools' traces.
      devices: those on which operations ran.
      problems: why the trace is not whole; empty when it is.
    """

    source: str
    spaces: tuple[Space, ...]
    about: Mapping[str, Any]
    programs: tuple[Program, ...]
    devices: tuple[Ops, ...]
    problems: tuple[str, ...]

    @functools.cached_property
    def base_ns(self) -> int:
        """Where the clock of the operations and of the host's events starts, on that of the trace."""
        return _base_ns(self.spaces)

    @functools.cached_property
    def host_events(self) -> HostEvents:
        """The events of the threads that call JAX."""
        return _host_events(self.spaces, self.base_ns)

    @functools.cached_property
    def steps(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps of each device, by its name; none where the trace does not tell the runs of programs apart."""
        return {ops.device: _steps(ops) for ops in self.devices}


def trace_files(path: Path) -> tuple[Path, ...]:
    """The `*.xplane.pb` of the newest capture under a directory, one a process; or the file itself.

    Raises:
      TraceError: there is none.
    """
    if path.is_file():
        return (path,)
    if not path.exists():
        raise TraceError(f"{str(path)!r} does not exist. Name a trace, or the directory of a capture.")
    found = sorted(path.rglob("*.xplane.pb"))
    if not found:
        raise TraceError(
            f"{str(path)!r} holds no *.xplane.pb. Capture one: `stack profile run --out {path} script.py`, or "
            "`with stack_profile.capture(...)`."
        )
    newest = max((file.parent for file in found), key=lambda folder: folder.stat().st_mtime_ns)
    return tuple(file for file in found if file.parent == newest)


def load_trace(path: Path | str) -> Trace:
    """Reads the newest capture under `path`; nothing is written there.

    Raises:
      TraceError: there is none, or it is no trace.
    """
    files = trace_files(Path(path))
    source = str(files[0] if len(files) == 1 else files[0].parent)
    beside = {name: proto for file in files for name, proto in _hlo_beside(file)}
    return trace_of([read_space(file) for file in files], source=source, about=_about(files[0]), beside=beside)


def trace_of(
    spaces: Sequence[Space],
    *,
    source: str = "memory",
    about: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Trace:
    """Joins the operations of the processes with their programs.

    Args:
      beside: HloProtos by the module's name, for programs that the trace itself lacks.
    """
    base_ns = _base_ns(spaces)
    problems: list[str] = []
    extra = [program for name, proto in (beside or {}).items() if (program := _read(proto, MISSING, name, problems))]
    programs = list(extra)
    devices: list[Ops] = []
    for index, space in enumerate(spaces):
        found = _programs(space, problems)
        programs += found.values()
        prefix = f"{space.hosts[0] if space.hosts else index}:" if len(spaces) > 1 else ""
        join = _Join.of(found, extra)
        for plane in space.planes:
            devices += _device_ops(plane, join, prefix, base_ns)
        problems += space.problems
    return Trace(source, tuple(spaces), about or {}, tuple(programs), tuple(devices), tuple(problems))


@dataclass(frozen=True)
class _Join:
    """Finds the program of an operation: by its key, or by the module's name where only one program has it."""

    by_key: Mapping[int, Program]
    by_name: Mapping[str, Program]

    @classmethod
    def of(cls, found: Mapping[int, Program], extra: Sequence[Program]) -> "_Join":
        programs = [*found.values(), *extra]
        counts = collections.Counter(program.name for program in programs)
        return cls(found, {program.name: program for program in programs if counts[program.name] == 1})

    def __call__(self, key: int, module: str) -> Program | None:
        return self.by_key.get(key) or self.by_name.get(module)


def _hlo_beside(file: Path) -> Iterable[tuple[str, bytes]]:
    """The programs that a capture wrote beside its trace, by the name of the module."""
    stem = file.name.removesuffix(".xplane.pb")
    for path in sorted(file.parent.glob(f"{glob.escape(stem)}.*.hlo.pb")):
        yield path.name.removeprefix(f"{stem}.").removesuffix(".hlo.pb"), path.read_bytes()


def _about(file: Path) -> Mapping[str, Any]:
    """What the capture wrote of its process; other tools write nothing."""
    path = file.with_name(file.name.removesuffix(".xplane.pb") + ".capture.json")
    try:
        about = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


_HLO_STAT: Final = "Hlo Proto"
_OP_LINES: Final = ("XLA Ops",)  # of TPUs, and of GPUs where XProf has derived them
_HOST_PLANE: Final = "/host:CPU"
_POOL_THREADS: Final = ("tf_",)
# What JAX and its runtime call their own events; all others are a program's annotations.
_JAX_CALL: Final = re.compile(
    r"PjitFunction|ParseArguments|\w+::|Pj[Rr]t|backend_compile|lower_|trace_to_|DevicePut|Transfer|BufferFromHost"
    r"|np\.asarray\(jax|shard_args|Compile|Handle inputs"
)
_MODULE_LINE: Final = "XLA Modules"
_END: Final = "end: "
_WHOLE: Final = 0.9  # a run with fewer of the usual number of operations began before the capture, or ended after it


def _base_ns(spaces: Sequence[Space]) -> int:
    return min((line.events.timestamp_ns for space in spaces for line in _lines(space)), default=0)


def _host_events(spaces: Sequence[Space], base_ns: int) -> HostEvents:
    names: dict[str, int] = {}
    columns = [np.zeros((3, 0), np.int64)]
    for plane in (plane for space in spaces for plane in space.planes if plane.name == _HOST_PLANE):
        for line in (line for line in plane.lines if not line.name.startswith(_POOL_THREADS)):
            kinds, inverse = np.unique(line.events.metadata, return_inverse=True)
            keys = [names.setdefault(plane.event_names.get(kind, ""), len(names)) for kind in kinds.tolist()]
            start = line.events.start_ps(base_ns)
            columns.append(np.stack([np.array(keys, np.int64)[inverse], start, start + line.events.duration_ps]))
    which, start, end = np.concatenate(columns, axis=1)
    keep = end > start
    is_call = np.array([_JAX_CALL.match(name) is not None for name in names], bool)
    return HostEvents(tuple(names), which[keep], start[keep], end[keep], np.flatnonzero(is_call[which[keep]]))


def _lines(space: Space) -> Iterable[Line]:
    return (line for plane in space.planes for line in plane.lines if len(line.events))


def _programs(space: Space, problems: list[str]) -> dict[int, Program]:
    """The programs of a process by key; those that are damaged are added to `problems`."""
    found: dict[int, Program] = {}
    for plane in space.planes:
        for event, name in plane.event_names.items() if plane.name == "/host:metadata" else ():
            stats = plane.event_stats(event)
            proto, key = stats.get(_HLO_STAT), stats.get("program_id", event)
            if isinstance(proto, bytes) and isinstance(key, int) and (program := _read(proto, key, name, problems)):
                found[key] = program
    return found


def _read(proto: bytes, key: int, name: str, problems: list[str]) -> Program | None:
    try:
        return read_program(proto, key)
    except TraceError as error:
        problems.append(f"{name}: {error}")
        return None


def _device_ops(plane: Plane, join: _Join, prefix: str, base_ns: int) -> list[Ops]:
    """The operations of the devices of a plane: of one, or of those that a host's threads run."""
    own_lines = [line for line in plane.lines if line.name in _OP_LINES]
    parts = [part for line in own_lines or plane.lines if (part := _op_events(plane, line, base_ns)) is not None]
    if not parts:
        return []
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if (columns["run"] == MISSING).all():
        columns["run"] = _runs(plane, columns["start"], base_ns)
    ends = _end_events(plane, base_ns)
    columns["end"] = np.maximum(columns["end"], _work_ends(columns, *ends)) if ends else columns["end"]
    devices = []
    for ordinal in np.unique(columns["device"]).tolist():
        rows = columns["device"] == ordinal
        name = plane.name.removeprefix("/device:") if plane.name.startswith("/device:") else f"CPU:{max(ordinal, 0)}"
        devices.append(_ops(prefix + name, plane, join, {key: column[rows] for key, column in columns.items()}))
    return devices


def _op_events(plane: Plane, line: Line, base_ns: int) -> dict[str, np.ndarray] | None:
    """The columns of a line's operations; None where it has none."""
    events = line.events
    name = events.stats["hlo_op"]
    if line.name in _OP_LINES:
        rows = np.arange(len(events))
        name = np.where(name == MISSING, _EVENT_NAMES + events.metadata, name)
    else:
        rows = np.flatnonzero(name != MISSING)
    if not len(rows):
        return None
    start = events.start_ps(base_ns)[rows]
    program = events.stats["program_id"][rows]
    return {
        "name": name[rows],
        "module": events.stats["hlo_module"][rows],
        "program": np.where(program == MISSING, _shared(plane, events.metadata[rows], "program_id"), program),
        "device": np.where(plane.name.startswith("/device:"), 0, events.stats["device_ordinal"][rows]),
        "run": events.stats["run_id"][rows],
        "producer": events.stats["_p"][rows],
        "start": start,
        "end": start + events.duration_ps[rows],
    }


_EVENT_NAMES: Final = 1 << 40  # keys of event names, beside those of texts


def _runs(plane: Plane, start: np.ndarray, base_ns: int) -> np.ndarray:
    """Which execution of a program each operation is in, from the line on which TPUs show these; else `MISSING`."""
    modules = next((line.events for line in plane.lines if line.name == _MODULE_LINE), None)
    if modules is None or not len(modules):
        return np.full(len(start), MISSING)
    begins = modules.start_ps(base_ns)
    order = np.argsort(begins)
    place = np.searchsorted(begins[order], start, "right") - 1
    inside = (place >= 0) & (start < (begins + modules.duration_ps)[order][place])
    return np.where(inside, place, MISSING)


def _shared(plane: Plane, metadata: np.ndarray, name: str) -> np.ndarray:
    """A number that all events of a kind share; `MISSING` where they have none."""
    kinds, inverse = np.unique(metadata, return_inverse=True)
    values = [plane.event_stats(kind).get(name) for kind in kinds.tolist()]
    return np.array([value if isinstance(value, int) else MISSING for value in values], np.int64)[inverse]


def _end_events(plane: Plane, base_ns: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The (consumer, time) of the events that mark the end of an operation's work, ordered; None without any."""
    kinds = [key for key, name in plane.event_names.items() if name.startswith(_END)]
    consumers: list[np.ndarray] = []
    times: list[np.ndarray] = []
    for line in plane.lines if kinds else ():
        events = line.events
        rows = np.flatnonzero(np.isin(events.metadata, kinds) & (events.stats["_c"] != MISSING))
        consumers.append(events.stats["_c"][rows])
        times.append(events.start_ps(base_ns)[rows])
    if not consumers:
        return None
    consumer, time = np.concatenate(consumers), np.concatenate(times)
    order = np.lexsort((time, consumer))
    return consumer[order], time[order]


def _work_ends(columns: Mapping[str, np.ndarray], consumer: np.ndarray, time: np.ndarray) -> np.ndarray:
    """When the work of each operation ended: at the first mark for it after its start, else as its event does.

    XLA's CPU runtime starts an operation in one event and marks its end in another, on whichever thread ends it.
    """
    order = np.lexsort((columns["start"], columns["producer"]))
    producer, start = columns["producer"][order], columns["start"][order]
    # Both in the order of (key, time): an operation's mark is the first that is not before it.
    keys = np.concatenate([producer, consumer])
    merged = np.lexsort(
        (np.concatenate([np.zeros(len(start)), np.ones(len(time))]), np.concatenate([start, time]), keys)
    )
    is_mark = merged >= len(start)
    following = np.minimum.accumulate(np.where(is_mark, np.arange(len(merged)), len(merged))[::-1])[::-1]
    ends = columns["end"].copy()
    rows = np.flatnonzero(~is_mark)
    marked = following[rows] < len(merged)
    rows, marks = rows[marked], merged[following[rows[marked]]] - len(start)
    same = consumer[marks] == producer[merged[rows]]
    ends[order[merged[rows[same]]]] = time[marks[same]]
    return ends


def _ops(device: str, plane: Plane, join: _Join, columns: Mapping[str, np.ndarray]) -> Ops:
    operations, which = _operations(plane, join, columns)
    order = np.argsort(columns["start"], kind="stable")
    which, start, end = which[order], columns["start"][order], columns["end"][order]
    depth = np.full(len(which), -1)
    outer = np.flatnonzero(np.array([operation.runs_others for operation in operations], bool)[which])
    depth[outer] = nesting(start[outer], end[outer])
    return Ops(device, operations, which, start, end, self_times(start, end, depth), columns["run"][order])


def _operations(
    plane: Plane, join: _Join, columns: Mapping[str, np.ndarray]
) -> tuple[tuple[Operation, ...], np.ndarray]:
    """The distinct operations, and which one each row is."""
    keys = np.stack([columns["program"], columns["module"], columns["name"]])
    pairs, which = np.unique(_codes(keys), return_inverse=True, return_index=True)[1:]
    found = []
    for program_key, module, name in keys[:, pairs].T.tolist():
        module_name = plane.text(module) if module != MISSING else ""
        program = join(program_key, module_name)
        text = plane.event_names[name - _EVENT_NAMES] if name >= _EVENT_NAMES else plane.text(name)
        instruction = program.instructions.get(text.removeprefix("%")) if program else None
        module_name = module_name or (program.name if program else "")
        found.append(Operation(text, module_name, program_key, program, instruction))
    return tuple(found), which.reshape(-1)


def _codes(keys: np.ndarray) -> np.ndarray:
    """One number for each column of alike keys."""
    code = np.zeros(keys.shape[1], np.int64)
    for row in keys:
        values, inverse = np.unique(row, return_inverse=True)
        code = np.unique(code * len(values) + inverse, return_inverse=True)[1]
    return code


def _steps(ops: Ops) -> tuple[Step, ...]:
    rows = np.flatnonzero(ops.run != MISSING)
    if not len(rows):
        return ()
    key = np.array([operation.program_key for operation in ops.operations])[ops.which[rows]]
    keys, inverse = np.unique(key, return_inverse=True)
    heaviest = keys[np.argmax(np.bincount(inverse, weights=ops.self_ps[rows]))]
    rows = rows[key == heaviest]
    runs, first, inverse, counts = np.unique(ops.run[rows], return_index=True, return_inverse=True, return_counts=True)
    starts = ops.start_ps[rows][first]
    ends = np.zeros(len(runs), np.int64)
    np.maximum.at(ends, inverse.reshape(-1), ops.end_ps[rows])
    order = np.argsort(starts)
    limits = np.append(starts[order][1:], ends[order][-1])
    whole = counts[order] >= _WHOLE * np.median(counts)
    inner = np.arange(len(runs)).clip(1, len(runs) - 2) == np.arange(len(runs))
    name = ops.operations[int(ops.which[rows[0]])].module
    return tuple(
        Step(name, int(runs[row]), int(starts[row]), int(end))
        for row, end, kept in zip(order, limits, whole | inner, strict=True)
        if kept
    )
