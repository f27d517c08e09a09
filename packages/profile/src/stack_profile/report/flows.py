"""The host's event that dispatched each operation of a device.

GPUs number the launches of kernels and copies: the launch on the host and its work on the device have one correlation
id. Elsewhere the call that dispatches a program and the operations of the run have one run id.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from stack_profile.captures.processes import names_of
from stack_profile.report.lanes import Lane
from stack_profile.traces.operations import Ops
from stack_profile.traces.trace import Trace
from stack_profile.traces.xplane import MISSING

__all__ = ["dispatches", "launches_of"]


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
        keys, inverse = np.unique(lane.keys[kind], return_inverse=True)
        sources = [senders.get((lane.process, kind, key), -1) + 1 for key in keys.tolist()]
        found[start : start + len(lane)] = np.array(sources, np.uint32)[inverse.reshape(-1)]
    return found


_LAUNCH: Final = 0
_RUN: Final = 1


def _senders(lanes: Sequence[Lane], first: np.ndarray) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yields (process, kind of key, key) with the index of the first event on a host thread that has it."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for lane, offset in zip(lanes, first.tolist(), strict=False):
        if lane.type != "thread" or lane.keys is None:
            continue
        for kind in (_LAUNCH, _RUN):
            for row in np.flatnonzero(lane.keys[kind] != MISSING).tolist():
                key, entry = (lane.process, kind, int(lane.keys[kind][row])), (int(lane.start_ps[row]), offset + row)
                found[key] = min(found.get(key, entry), entry)
    yield from ((key, event) for key, (_, event) in found.items())
