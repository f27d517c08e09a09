"""The host's event that dispatched each operation of a device.

GPUs number the launches of kernels and copies: the launch on the host and its work on the device have one correlation
id. Elsewhere the call that dispatches a program and the operations of the run have one run id. On CPUs no dispatch has
one, and the calls of a program are paired with its runs in order, as devices run them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stack_profile.captures.processes import names_of
from stack_profile.report.lanes import Lane
from stack_profile.traces.operations import Ops
from stack_profile.traces.trace import Trace
from stack_profile.traces.xplane import MISSING

__all__ = ["dispatches", "identify_calls", "launches_of"]


def launches_of(trace: Trace, ops: Ops) -> np.ndarray:
    """Returns the correlation id of each execution on a device; `MISSING` if the trace has none."""
    found = np.full(len(ops), MISSING)
    for space, prefix in zip(trace.spaces, names_of(trace.spaces), strict=True):
        for plane in space.planes:
            if f"{prefix}{plane.name.removeprefix('/device:')}" != ops.device:
                continue
            parts = [
                np.stack([line.events.start_ps(trace.base_ns), line.events.stats["correlation_id"]])
                for line in plane.lines
            ]
            start, launch = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
            order = np.argsort(start[launch != MISSING], kind="stable")
            start, launch = start[launch != MISSING][order], launch[launch != MISSING][order]
            if len(start):
                place = np.searchsorted(start, ops.start_ps).clip(max=len(start) - 1)
                found = np.where(start[place] == ops.start_ps, launch[place], MISSING)
    return found


def dispatches(lanes: Sequence[Lane]) -> np.ndarray:
    """Returns for each event of all lanes 1 + the index of the event that dispatched it, and 0 for other events."""
    first = np.cumsum([0, *map(len, lanes)])
    found = np.zeros(first[-1], np.uint32)
    senders = dict(_senders(lanes, first))
    for lane, start in zip(lanes, first.tolist(), strict=False):
        if lane.type != "operations" or lane.keys is None:
            continue
        has_launches = bool((lane.keys[_LAUNCH] != MISSING).any())
        kind = _LAUNCH if has_launches else _RUN
        keys, place, inverse = np.unique(lane.keys[kind], return_index=True, return_inverse=True)
        begun = lane.start_ps[place].tolist()
        sources = [senders.get((lane.process, kind, key), (0, -1)) for key in keys.tolist()]
        # An event that begins later, such as a wait for the run, has not dispatched it.
        numbers = [event + 1 if time <= at else 0 for (time, event), at in zip(sources, begun, strict=True)]
        found[start : start + len(lane)] = np.array(numbers, np.uint32)[inverse.reshape(-1)]
    return found


def identify_calls(lanes: Sequence[Lane], kinds: Sequence[Mapping[str, Any]]) -> None:
    """Gives calls on CPUs the ids of the runs that they dispatch: `keys` of lanes of threads are changed.

    Args:
      lanes: all lanes.
      kinds: properties of each kind of events, see `Recorded`.
    """
    for lane in lanes:
        if lane.type != "operations" or lane.keys is None or (lane.keys[_LAUNCH] != MISSING).any():
            continue
        runs, place = np.unique(lane.keys[_RUN], return_index=True)
        order = np.argsort(place)
        modules = np.array([str(kinds[each].get("module")) for each in lane.kind[place[order]].tolist()])
        for module, calls in _calls(lanes, kinds, lane.process).items():
            mine = order[modules == module]
            _pair(calls, runs[mine].tolist(), lane.start_ps[place[mine]].tolist())


_LAUNCH: Final = 0
_RUN: Final = 1


_Call = tuple[int, int, np.ndarray]  # start, row of its lane, keys of its lane
_CALL: Final = re.compile(r"PjitFunction\((?:jit\()?([^()]+)\)*")


def _senders(lanes: Sequence[Lane], first: np.ndarray) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Yields (process, kind of key, key) with start and index of the first event on a host thread that has it."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for lane, offset in zip(lanes, first.tolist(), strict=False):
        if lane.type != "thread" or lane.keys is None:
            continue
        for kind in (_LAUNCH, _RUN):
            for row in np.flatnonzero(lane.keys[kind] != MISSING).tolist():
                key, entry = (lane.process, kind, int(lane.keys[kind][row])), (int(lane.start_ps[row]), offset + row)
                found[key] = min(found.get(key, entry), entry)
    yield from found.items()


def _calls(lanes: Sequence[Lane], kinds: Sequence[Mapping[str, Any]], process: int) -> dict[str, list[_Call]]:
    """Returns the calls of each module on the threads of a process, in order of time."""
    found: dict[str, list[_Call]] = {}
    for lane in lanes:
        if lane.type != "thread" or lane.process != process or lane.keys is None:
            continue
        ended: dict[str, int] = {}
        columns = (lane.kind.tolist(), lane.start_ps.tolist(), lane.duration_ps.tolist())
        for row, (kind, start, length) in enumerate(zip(*columns, strict=True)):
            match = _CALL.match(str(kinds[kind]["name"]))
            # A call is recorded twice, by Python and by the runtime, one event inside of the other.
            if match and start >= ended.get(match[1], start):
                ended[match[1]] = start + length
                found.setdefault(f"jit_{match[1]}", []).append((start, row, lane.keys))
    return {module: sorted(calls, key=lambda call: call[0]) for module, calls in found.items()}


def _pair(calls: Sequence[_Call], runs: Sequence[int], begun: Sequence[int]) -> None:
    """Writes the ids of runs, in order of time, to the keys of their calls.

    The first runs may have been dispatched before the trace. As few of them as possible have no call, under the
    condition that each call begins before its run.
    """
    for skipped in range(len(runs)):
        pairs = list(zip(calls, runs[skipped:], begun[skipped:], strict=False))
        if all(start <= at for (start, _, _), _, at in pairs):
            for (_, row, keys), run, _ in pairs:
                keys[_RUN, row] = run
            return
