"""Joins the events of a device with their programs."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from stack_profile.traces.cuda_graphs import Kind, join_graphs
from stack_profile.traces.hlo import Program
from stack_profile.traces.intervals import nesting, self_times
from stack_profile.traces.operations import Operation, Ops
from stack_profile.traces.xplane import MISSING, Events, Line, Plane

__all__ = ["Executions", "Join", "device_ops", "executions", "join"]


_Owner = tuple[int, str]  # number and module name of a program in events


@dataclass(frozen=True)
class Join:
    """The programs that ran in a process, by number and module name in the events.

    A program loaded from JAX's compile cache runs under a number from another process, which may belong to a different
    program in this one. A number is therefore used only if the module's name agrees and the program has all operations
    that ran under that number. Otherwise the candidates are the programs of that name with all of these operations. A
    candidate is used if it is the only one, or if the operations have the same lines and scopes in all candidates.
    Events of TPUs do not name the module, but number a program by its content.

    Attributes:
      found: program of each owner; None without a fitting program, or with several different ones.
      candidates: number of fitting programs where `found` has None; empty for a trace without programs.
      kernels: program and name of the instruction of kernels whose program used CUDA graphs.
      graph_problems: messages about these kernels.
    """

    found: Mapping[_Owner, Program | None]
    candidates: Mapping[_Owner, int]
    kernels: Mapping[Kind, tuple[Program, str]] = field(default_factory=dict)
    graph_problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, programs: Mapping[int, Program], ran: Mapping[_Owner, AbstractSet[str]]) -> "Join":
        """Joins the names of operations that ran with the process's programs by number."""
        by_number = {owner: programs[owner[0]] for owner, names in ran.items() if _numbered(programs, owner, names)}
        named: dict[str, list[Program]] = {}
        for program in programs.values():
            named.setdefault(program.name, []).append(program)

        def fitting(owner: _Owner) -> list[Program]:
            found = (each for each in named.get(owner[1], ()) if not each.damage)
            return [each for each in found if ran[owner] <= each.instructions.keys()]

        fits = {owner: fitting(owner) for owner in ran.keys() - by_number.keys()}
        if any(fits.values()):  # numbers come from another process, and may match only by accident
            fits |= {owner: fitting(owner) for owner in by_number if owner[1]}
        found: dict[_Owner, Program | None] = dict.fromkeys(ran) | by_number
        for owner, each in fits.items():
            only = each[0] if _alike(each, ran[owner]) else None
            found[owner] = only and by_number.get(owner, only)
        unjoined = {owner: len(fits[owner]) for owner, program in found.items() if program is None and programs}
        return cls(found, unjoined)

    def problems(self) -> Iterator[str]:
        """Yields a message about operations without a program and thus without lines."""
        unjoined = [
            f"{module} ({key}{f', which {count} programs fit' if count else ''})"
            for (key, module), count in sorted(self.candidates.items())
            if module
        ]
        if unjoined:
            yield f"Unknown programs, whose operations have no lines: {', '.join(unjoined)}"
        yield from self.graph_problems

    def operation(self, kind: Kind) -> Operation:
        """Returns the operation of a kind of execution, with its program and instruction if they are known."""
        program, name = self.kernels.get(kind, (None, kind.kernel if kind.in_graph else kind.name))
        key = program.key if program is not None else kind.key
        if program is None and not kind.beside and not kind.in_graph:
            program = self.found.get((kind.key, kind.module))
        instruction = program.instructions.get(name.removeprefix("%")) if program else None
        module = kind.module or (program.name if program else "")
        return Operation(name, module, key, program, instruction, beside=kind.beside, kernel=kind.kernel)


def _numbered(programs: Mapping[int, Program], owner: _Owner, names: AbstractSet[str]) -> bool:
    """Returns whether the program with the owner's number is the program that ran."""
    key, module = owner
    program = programs.get(key)
    if program is None or module not in ("", program.name) or program.damage:
        return False
    return names <= program.instructions.keys() if module else not names.isdisjoint(program.instructions)


def _alike(programs: Sequence[Program], names: AbstractSet[str]) -> bool:
    """Returns whether the operations have the same lines and scopes in all programs; False without programs."""
    places = {
        tuple((found.op_name, found.frames) for name in sorted(names) if (found := program.instructions[name]))
        for program in programs
    }
    return len(places) == 1


@dataclass(frozen=True)
class Executions:
    """Executions on the devices of a plane, one per row.

    Attributes:
      plane: plane of the events.
      kinds: the distinct operations.
      which: index of each row's operation in `kinds`.
      columns: columns such as device, run, start and end.
    """

    plane: Plane
    kinds: tuple[Kind, ...]
    which: np.ndarray
    columns: Mapping[str, np.ndarray]


def executions(plane: Plane, base_ns: int) -> Executions | None:
    """Returns the executions on a plane's devices, either one device or the host's CPU devices; None without any."""
    # A line of operations has all of these; on CPUs they are spread over the threads of a pool.
    own_lines = [line for line in plane.lines if line.name in _OP_LINES]
    parts = [part for line in own_lines or plane.lines if (part := _op_events(plane, line, base_ns)) is not None]
    if not parts:
        return None
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # Events of TPUs lack the number of the run.
    if (columns["run"] == MISSING).all():
        columns["run"] = _runs(plane, columns["host_start"], base_ns)
    ends = _end_events(plane, base_ns)
    columns["end"] = np.maximum(columns["end"], _work_ends(columns, *ends)) if ends else columns["end"]
    return Executions(plane, *_kinds(plane, columns), columns)


def join(ran: Sequence[Kind], programs: Mapping[int, Program]) -> Join:
    """Finds the programs of all operations that ran in a process among the trace's programs."""
    owners: dict[_Owner, list[Kind]] = {}
    for kind in ran:
        owners.setdefault((kind.key, kind.module), []).append(kind)
    graphs = {owner: kinds for owner, kinds in owners.items() if any(kind.in_graph for kind in kinds)}
    names = {owner: {kind.name.removeprefix("%") for kind in owners[owner]} for owner in owners if owner not in graphs}
    joined = Join.of(programs, names)
    kernels: dict[Kind, tuple[Program, str]] = {}
    problems: list[str] = []
    candidates = dict(joined.candidates)
    for (key, module), kinds in graphs.items():
        named = [each for each in programs.values() if each.name == module]
        found, messages = join_graphs(kinds, named, programs.get(key))
        kernels |= found
        problems += messages
        if not found and programs:
            candidates[key, module] = 0
    return Join(joined.found, candidates, kernels, tuple(problems))


def device_ops(ran: Executions, joined: Join, prefix: str) -> list[Ops]:
    """Returns the operations of each device of a plane, with their programs."""
    plane = ran.plane
    devices: list[Ops] = []
    # Several graphs may contain one instruction.
    operations: dict[Operation, int] = {}
    place = np.array([operations.setdefault(joined.operation(kind), len(operations)) for kind in ran.kinds], np.int64)
    every = _with_extras(tuple(operations), place[ran.which], ran.columns["end"] - ran.columns["start"])
    for ordinal in np.unique(ran.columns["device"]).tolist():
        rows = ran.columns["device"] == ordinal
        # `MISSING` is negative: events without an ordinal are of device 0.
        name = plane.name.removeprefix("/device:") if plane.name.startswith("/device:") else f"CPU:{max(ordinal, 0)}"
        kinds, which = np.unique(place[ran.which[rows]], return_inverse=True)
        own = tuple(every[kind] for kind in kinds.tolist())
        columns = (ran.columns[column][rows] for column in ("start", "end", "run"))
        devices.append(_ops(prefix + name, own, which.reshape(-1), *columns))
    return devices


def _with_extras(operations: Sequence[Operation], which: np.ndarray, duration: np.ndarray) -> tuple[Operation, ...]:
    """Marks all but the longest of several kernels of one instruction."""
    time = np.bincount(which, weights=duration, minlength=len(operations))
    longest: dict[tuple[int, str], int] = {}
    for row, each in enumerate(operations):
        if each.kernel and each.instruction is not None:
            key = id(each.program), each.instruction.name
            longest[key] = max(longest.get(key, row), row, key=lambda found: (time[found], -found))
    kept = set(longest.values())
    return tuple(
        replace(each, extra=True) if each.kernel and each.instruction is not None and row not in kept else each
        for row, each in enumerate(operations)
    )


def _op_events(plane: Plane, line: Line, base_ns: int) -> dict[str, np.ndarray] | None:
    """Returns the columns of a line's operations, or None without any."""
    events = line.events
    name = events.stats["hlo_op"]
    named = _HLO if line.name in _OP_LINES else _OTHER if line.name.startswith(_STREAM) else None
    rows = np.flatnonzero(name != MISSING) if named is None else np.arange(len(events))
    if not len(rows):
        return None
    host_start = events.start_ps(base_ns)
    start, end = _times(events, host_start)
    program = events.stats["program_id"][rows]
    return {
        "kind": np.where(name == MISSING, named or _TEXT, _TEXT)[rows],
        "name": np.where(name == MISSING, events.metadata, name)[rows],
        "module": events.stats["hlo_module"][rows],
        # Some devices store the number once per kind of event instead of in each.
        "program": np.where(program == MISSING, _shared(plane, events.metadata[rows], "program_id"), program),
        "device": np.where(plane.name.startswith("/device:"), 0, events.stats["device_ordinal"][rows]),
        "run": events.stats["run_id"][rows],
        "producer": events.stats["_p"][rows],
        "kernel": events.metadata[rows] if line.name.startswith(_STREAM) else np.full(len(rows), MISSING),
        "launch": events.stats["correlation_id"][rows],
        "node": events.stats["cuda_graph_node_id"][rows],
        "instruction": events.stats["unique_hlo_op_id"][rows],
        "host_start": host_start[rows],
        "start": start[rows],
        "end": end[rows],
    }


def _times(events: Events, host_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and end of events, on a TPU's own clock if it was recorded.

    The TPU's clock is aligned with the host's at the first event. Times on the host's clock have been corrected
    piecewise, which changes durations by up to a tenth.
    """
    offset, duration = events.stats["device_offset_ps"], events.stats["device_duration_ps"]
    if not len(events) or (offset == MISSING).any() or (duration == MISSING).any():
        return host_start, host_start + events.duration_ps
    start = host_start[0] - offset[0] + offset
    return start, start + duration


_OP_LINES: Final = ("XLA Ops",)  # on TPUs, and on GPUs if XProf derived it
_STREAM: Final = "Stream #"  # on GPUs; it also holds copies and kernels that belong to no program
_MODULE_LINE: Final = "XLA Modules"
_END: Final = "end: "
# Source of a row's name: a text, an event on a line of operations, or an event on a stream that is not an operation.
_TEXT, _HLO, _OTHER = 0, 1, 2


def _runs(plane: Plane, start: np.ndarray, base_ns: int) -> np.ndarray:
    """Returns the program execution that each operation is in, from the TPU's module line; otherwise `MISSING`."""
    modules = next((line.events for line in plane.lines if line.name == _MODULE_LINE), None)
    if modules is None or not len(modules):
        return np.full(len(start), MISSING)
    begins = modules.start_ps(base_ns)
    order = np.argsort(begins)
    place = np.searchsorted(begins[order], start, "right") - 1
    inside = (place >= 0) & (start < (begins + modules.duration_ps)[order][place])
    return np.where(inside, place, MISSING)


def _shared(plane: Plane, metadata: np.ndarray, name: str) -> np.ndarray:
    """Returns a number that all events of a kind share, `MISSING` if they have none."""
    kinds, inverse = np.unique(metadata, return_inverse=True)
    values = [plane.event_stats(kind).get(name) for kind in kinds.tolist()]
    return np.array([value if isinstance(value, int) else MISSING for value in values], np.int64)[inverse]


def _end_events(plane: Plane, base_ns: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (consumer, time) of the events that mark the end of an operation's work, in order; None without any."""
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
    """Returns the end of each operation's work: the first mark after its start, otherwise the end of its event.

    XLA's CPU runtime starts an operation in one event and marks its end in another, on the thread that finishes the
    work.
    """
    order = np.lexsort((columns["start"], columns["producer"]))
    producer, start = columns["producer"][order], columns["start"][order]
    # Merge both in order of (key, time); an operation's mark is the first one not before its start.
    keys = np.concatenate([producer, consumer])
    merged = np.lexsort(
        (np.concatenate([np.zeros(len(start)), np.ones(len(time))]), np.concatenate([start, time]), keys)
    )
    is_mark = merged >= len(start)
    # Index of the next mark at or after each entry, found from the end.
    following = np.minimum.accumulate(np.where(is_mark, np.arange(len(merged)), len(merged))[::-1])[::-1]
    ends = columns["end"].copy()
    rows = np.flatnonzero(~is_mark)
    marked = following[rows] < len(merged)
    rows, marks = rows[marked], merged[following[rows[marked]]] - len(start)
    same = consumer[marks] == producer[merged[rows]]
    ends[order[merged[rows[same]]]] = time[marks[same]]
    return ends


def _ops(
    device: str,
    operations: tuple[Operation, ...],
    which: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    run: np.ndarray,
) -> Ops:
    order = np.argsort(start, kind="stable")
    which, start, end, run = which[order], start[order], end[order], run[order]
    if (run == MISSING).all():
        run = _repetitions(operations, which)
    depth = np.full(len(which), -1)
    outer = np.flatnonzero(np.array([each.is_container or each.beside for each in operations], bool)[which])
    depth[outer] = nesting(start[outer], end[outer])
    return Ops(device, operations, which, start, end, self_times(start, end, depth), run)


def _repetitions(operations: Sequence[Operation], which: np.ndarray) -> np.ndarray:
    """Returns the execution of its program that each row is in, counted by the program's first operation.

    Events of GPUs lack this number. The first operation outside of loops begins each run of its program. If the program
    is not known, the operations that ran the fewest times are assumed to be outside of loops. Several kernels of one
    operation run consecutively.
    """
    run = np.full(len(which), MISSING)
    owners = [None if each.beside else each.owner for each in operations]
    for owner in dict.fromkeys(each for each in owners if each is not None and each[1] != MISSING):
        rows = np.flatnonzero(np.array([each == owner for each in owners], bool)[which])
        if not len(rows):
            continue
        of_rows = which[rows]
        begins = np.append(True, of_rows[1:] != of_rows[:-1])
        counts = np.bincount(of_rows[begins], minlength=len(operations))
        once = np.array([each.is_entry for each in operations], bool) & (counts > 0)
        if not once[of_rows].any():
            once = counts == counts[counts > 0].min()
        first = of_rows[np.argmax(once[of_rows])]
        run[rows] = np.maximum(np.cumsum(begins & (of_rows == first)) - 1, 0)
    return run


def _kinds(plane: Plane, columns: Mapping[str, np.ndarray]) -> tuple[tuple[Kind, ...], np.ndarray]:
    """Returns the distinct operations, and the index of each row's operation."""
    keys = np.stack([columns[name] for name in ("kind", "program", "module", "name", "kernel", "node", "instruction")])
    pairs, which = np.unique(_codes(keys), return_inverse=True, return_index=True)[1:]
    which = which.reshape(-1)
    offsets = _offsets(columns, which, len(pairs))
    found = []
    for row, (kind, key, module, name, kernel, node, instruction) in enumerate(keys[:, pairs].T.tolist()):
        text = plane.text(name) if kind == _TEXT else plane.event_names.get(name, "")
        text = text.rpartition("::")[2] if kind == _TEXT else text  # XLA's annotations, innermost last
        named = plane.event_names.get(kernel, "") if kernel != MISSING else ""
        owner = key, plane.text(module) if module != MISSING else ""
        found.append(Kind(kind == _OTHER, *owner, text, named, node, instruction, offsets[row]))
    return tuple(found), which


def _offsets(columns: Mapping[str, np.ndarray], which: np.ndarray, kinds: int) -> list[int]:
    """Returns the earliest start of each kind's kernels since the launch of their CUDA graph, 0 outside of graphs."""
    rows = np.flatnonzero(columns["node"] != MISSING)
    offsets = np.zeros(kinds, np.int64)
    if len(rows):
        start = columns["start"][rows]
        launch = np.unique(columns["launch"][rows], return_inverse=True)[1].reshape(-1)
        first = np.full(int(launch.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, launch, start)
        offsets[which[rows]] = np.iinfo(np.int64).max
        np.minimum.at(offsets, which[rows], start - first[launch])
    return offsets.tolist()


def _codes(keys: np.ndarray) -> np.ndarray:
    """Returns one number per column; equal columns have equal numbers."""
    code = np.zeros(keys.shape[1], np.int64)
    for row in keys:
        values, inverse = np.unique(row, return_inverse=True)
        # Renumber after each row: the product of several rows could overflow int64.
        code = np.unique(code * len(values) + inverse, return_inverse=True)[1]
    return code
