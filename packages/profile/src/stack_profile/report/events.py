"""Events of a trace for the interactive page: lanes, the kinds of events, and one row per event.

Lanes are the steps and operations of devices, and the threads of hosts with their sampled Python stacks. Each event has
a kind with the common properties of all executions of an operation, or of all host events with one name.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stack_profile.analyses.ops import layer_names
from stack_profile.analyses.roofline import roof_of
from stack_profile.captures.processes import names_of
from stack_profile.report.flows import dispatches, identify_calls, launches_of
from stack_profile.report.host_lanes import host_lanes
from stack_profile.report.lanes import Lane, derived_lanes, host_group
from stack_profile.report.stack_lanes import StackLanes
from stack_profile.report.work_lanes import work_lanes
from stack_profile.traces.categories import category_of
from stack_profile.traces.host_stacks import HostStacks, thread_of
from stack_profile.traces.instructions import Frame, Instruction
from stack_profile.traces.intervals import nesting, self_times, tracks
from stack_profile.traces.operations import Operation, Ops, Step
from stack_profile.traces.short_paths import ShortPaths
from stack_profile.traces.trace import Trace, is_jax_call
from stack_profile.traces.xplane import MISSING, Line, Plane, Space

__all__ = ["EVENTS", "Recorded", "recorded_events"]

EVENTS: Final = 1_000_000  # default limit of events on a page
_BOOKKEEPING: Final = ("ThreadpoolListener::", "end: ")
_MOST_ROWS: Final = np.iinfo(np.uint16).max


@dataclass
class Recorded:
    """Lanes of events, and their tables.

    Attributes:
      lanes: all lanes, in display order.
      kinds: shared properties of events, one mapping per kind.
      frames: Python frames (file, line, function, whether it is the user's).
      stacks: indices of `frames`, innermost first.
      files: the user's files by their short names.
      left_out: number of events dropped because of the limit.
      dispatched_by: for each event 1 + the index of the host's event that dispatched it, or 0.
    """

    lanes: list[Lane] = field(default_factory=list)
    kinds: list[dict[str, Any]] = field(default_factory=list)
    frames: list[tuple[str, int, str, bool]] = field(default_factory=list)
    stacks: list[list[int]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    dispatched_by: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))

    @property
    def lane_table(self) -> list[Mapping[str, Any]]:
        """The description of each lane, in the order of the columns."""
        return [
            {"group": lane.group, "name": lane.name, "type": lane.type, "rows": lane.rows, "count": len(lane)}
            for lane in self.lanes
        ]

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Concatenated columns of all lanes; starts are differences from the previous event of the lane."""
        lanes = self.lanes
        starts = [np.diff(each.start_ps, prepend=0) for each in lanes]
        # Durations minus self times are mostly 0, which compresses to nothing.
        parts = [each.duration_ps - each.self_ps for each in lanes]
        return {
            "start": _joined(starts, np.int64),
            "duration": _joined([each.duration_ps for each in lanes], np.int64),
            "inside": _joined(parts, np.float64),
            "kind": _joined([each.kind for each in lanes], np.uint32),
            "row": _joined([each.row for each in lanes], np.uint16),
            "dispatched_by": self.dispatched_by,
            "extra": _joined(
                [np.zeros(len(each)) if each.extra_ps is None else each.extra_ps for each in lanes], np.float64
            ),
        }


def recorded_events(trace: Trace, paths: ShortPaths, *, limit: int = EVENTS) -> Recorded:
    """Collects the events of a trace.

    Args:
      trace: the trace.
      paths: short names of files.
      limit: maximum number of events; the shortest are dropped, host threads first.
    """
    return _Collector(trace, paths).collect(limit)


class _Collector:
    """Builds the tables of `Recorded`, in which each kind, frame and stack exists once."""

    def __init__(self, trace: Trace, paths: ShortPaths) -> None:
        self._trace, self._paths = trace, paths
        self._roof = roof_of(trace)
        self._layer = layer_names(trace.devices)
        self._recorded = Recorded()
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[Frame, ...], int] = {}
        self._host_kinds: dict[str, int] = {}

    def collect(self, limit: int) -> Recorded:
        trace, recorded = self._trace, self._recorded
        for each in trace.devices:
            steps = trace.steps[each.device]
            recorded.lanes += [self._steps(each.device, steps)] if steps else []
            recorded.lanes.append(self._operations(each))
        processes = zip(trace.spaces, names_of(trace.spaces), trace.host_stacks, strict=True)
        for process, (space, prefix, stacks) in enumerate(processes):
            threads = self._threads(space, host_group(trace, prefix), stacks)
            recorded.lanes += [dataclasses.replace(lane, process=process) for lane in threads]
        self._leave_out(limit)
        if self._recorded.lanes:
            self._insert(derived_lanes(trace, self._kinds, self._place))
            self._insert(work_lanes(trace, self._kinds))
            recorded.lanes[:0] = host_lanes(trace, self._kinds)
        identify_calls(recorded.lanes, recorded.kinds)
        recorded.dispatched_by = dispatches(recorded.lanes)
        return recorded

    def _insert(self, derived: Iterable[Lane]) -> None:
        """Puts derived lanes at the top of their groups, below the steps."""
        lanes = self._recorded.lanes
        for lane in derived:
            own = [place for place, each in enumerate(lanes) if each.group == lane.group]
            steps = [place for place in own if lanes[place].type not in ("operations", "thread", "stacks")]
            lanes.insert(steps[-1] + 1 if steps else own[0] if own else len(lanes), lane)

    def _steps(self, device: str, steps: Sequence[Step]) -> Lane:
        first = self._kinds([{"type": "step", "name": f"step {step.number}", "module": step.program} for step in steps])
        start = np.array([step.start_ps for step in steps], np.int64)
        duration = np.array([step.duration_ps for step in steps], np.int64)
        kind = first + np.arange(len(steps))
        return Lane(device, "steps", "steps", 1, start, duration, duration.astype(float), kind, np.zeros_like(kind))

    def _operations(self, ops: Ops) -> Lane:
        first = self._kinds([self._operation(each) for each in ops.operations])
        # Loops and calls on the first rows, the operations that they run below.
        outer = ops.tracks % 2 == 0
        loops = int(ops.tracks[outer].max(initial=-2)) // 2 + 1
        row = np.where(outer, ops.tracks // 2, loops + ops.tracks // 2).clip(max=_MOST_ROWS)
        duration = ops.end_ps - ops.start_ps
        rows = int(row.max(initial=0)) + 1
        columns = (ops.start_ps, duration, ops.self_ps, first + ops.which, row)
        prefixes = names_of(self._trace.spaces)
        process = max(
            range(len(prefixes)), key=lambda each: len(prefixes[each]) * ops.device.startswith(prefixes[each])
        )
        keys = np.stack([launches_of(self._trace, ops), ops.run])
        return Lane(ops.device, "operations", "operations", rows, *columns, process=process, keys=keys)

    def _operation(self, operation: Operation) -> dict[str, Any]:
        instruction = operation.instruction
        kind: dict[str, Any] = {
            "type": "operation",
            "name": operation.name,
            "module": operation.module,
            "category": category_of(operation),
        }
        if operation.kernel and operation.kernel != operation.name:
            kind["kernel"] = operation.kernel
        if operation.is_container or operation.beside:
            kind["contains"] = True
        if cost := operation.cost:
            kind |= {"flops": operation.flops, "bytes": cost.traffic_bytes}
            ideal_s, bound = self._roof.ideal(operation)
            kind |= {"ideal": ideal_s, "bound": bound} if ideal_s is not None else {}
        return kind | self._place(instruction, self._layer(operation)) if instruction is not None else kind

    def _place(self, instruction: Instruction, layer: str | None = None) -> dict[str, Any]:
        source, package = instruction.source(), instruction.package_source
        known = {
            "layer": instruction.layer if layer is None else layer,
            "scope": instruction.scope.path,
            "pass": instruction.scope.direction,
            "opcode": instruction.opcode,
            "op_name": instruction.op_name,
            "origin": instruction.origin,
            "line": f"{self._paths.frame(source)}:{source.line}" if source else "",
            "file": self._paths.frame(source) if source else "",
            "package_line": str(package) if package else "",
        }
        found: dict[str, Any] = {name: value for name, value in known.items() if value}
        if instruction.frames:
            found |= {"stack": self._stack(instruction.frames), "outer": instruction.outer}
        return found

    def _stack(self, frames: tuple[Frame, ...]) -> int:
        if frames not in self._stacks:
            self._stacks[frames] = len(self._recorded.stacks)
            self._recorded.stacks.append([self._frame(frame) for frame in frames])
        return self._stacks[frames]

    def _frame(self, frame: Frame) -> int:
        if frame not in self._frames:
            self._frames[frame] = len(self._recorded.frames)
            name = self._paths.frame(frame)
            self._recorded.frames.append((name, frame.line, frame.function, not frame.package))
            if not frame.package:
                self._recorded.files.setdefault(name, frame.file)
        return self._frames[frame]

    def _kinds(self, kinds: Sequence[dict[str, Any]]) -> int:
        """Adds kinds, and returns the index of the first."""
        first = len(self._recorded.kinds)
        self._recorded.kinds += kinds
        return first

    def _threads(self, space: Space, group: str, stacks: HostStacks | None) -> Iterator[Lane]:
        """Yields collections, waits for the interpreter, and events of each thread with its sampled stacks below."""
        names: collections.Counter[str] = collections.Counter()
        sampled = StackLanes(stacks, group, self._kinds, self._stack, self._paths) if stacks else None
        yield from filter(None, [sampled.collections(), sampled.waits()] if sampled else [])
        seen: set[int] = set()
        hosts = [plane for plane in space.planes if plane.name == "/host:CPU"]
        for plane, line in ((host, line) for host in hosts for line in host.lines):
            lane = self._thread(group, plane, line)
            thread = thread_of(line, stacks.threads) if stacks else None
            if lane is not None:
                name = lane.name if stacks is None or thread is None else stacks.threads[thread].name
                names[name] += 1
                yield dataclasses.replace(lane, name=f"{name} ({names[name]})" if names[name] > 1 else name)
            if sampled is not None and thread is not None and thread not in seen:
                seen.add(thread)
                yield from filter(None, [sampled.thread(thread)])
        if sampled is not None:
            yield from sampled.threads(seen)

    def _thread(self, group: str, plane: Plane, line: Line) -> Lane | None:
        """Returns a thread's events except the runtime's bookkeeping and operations, which are on their device."""
        events = line.events
        shown = [key for key, name in plane.event_names.items() if not name.startswith(_BOOKKEEPING)]
        duration = events.duration_ps
        keep = np.isin(events.metadata, shown) & (duration > 0) & (events.stats["hlo_op"] == MISSING)
        if not keep.any():
            return None
        start = events.start_ps(self._trace.base_ns)
        rows = np.flatnonzero(keep)
        rows = rows[np.lexsort((-duration[rows], start[rows]))]
        start, end = start[rows], (start + duration)[rows]
        depth = nesting(start, end)
        row = depth if _is_nested(start, end, depth) else tracks(start, end)
        keys, inverse = np.unique(events.metadata[rows], return_inverse=True)
        kinds = np.array([self._host_kind(plane.event_names[key]) for key in keys.tolist()], np.int64)
        self_ps = self_times(start, end, depth)
        rows_ = int(row.max()) + 1
        keys_ = np.stack([events.stats[name][rows] for name in ("correlation_id", "run_id")])
        columns = (start, end - start, self_ps, kinds[inverse], row)
        return Lane(group, line.name or "thread", "thread", rows_, *columns, keys=keys_)

    def _host_kind(self, name: str) -> int:
        if name not in self._host_kinds:
            kind = "JAX and its runtime" if is_jax_call(name) else "annotation"
            self._host_kinds[name] = self._kinds([{"type": "host", "name": name, "category": kind}])
        return self._host_kinds[name]

    def _leave_out(self, limit: int) -> None:
        """Removes the shortest events beyond the limit, of threads first."""
        lanes = self._recorded.lanes
        for types in (("thread", "stacks", "gc"), ("operations", "steps")):
            chosen = [place for place, lane in enumerate(lanes) if lane.type in types]
            excess = sum(map(len, lanes)) - limit
            if excess <= 0 or not chosen:
                continue
            durations = np.concatenate([lanes[place].duration_ps for place in chosen])
            kept = np.ones(len(durations), bool)
            kept[np.argsort(durations, kind="stable")[:excess]] = False
            self._recorded.left_out += int(np.count_nonzero(~kept))
            edges = [0, *itertools.accumulate(len(lanes[place]) for place in chosen)]
            for place, (first, last) in zip(chosen, itertools.pairwise(edges), strict=True):
                lanes[place] = lanes[place].keep(kept[first:last])
        self._recorded.lanes = [lane for lane in lanes if len(lane)]


def _is_nested(start: np.ndarray, end: np.ndarray, depth: np.ndarray) -> bool:
    """Returns whether events of one depth do not overlap; events of asynchronous work may."""
    order = np.lexsort((start, depth))
    same = np.diff(depth[order]) == 0
    return bool((start[order][1:] >= end[order][:-1])[same].all())


def _joined(columns: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(column.astype(dtype) for column in columns)])
