"""Allocations and frees that a device's allocator recorded, such as XLA's best-fit allocator on GPUs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stack_profile.captures.processes import names_of
from stack_profile.traces.xplane import MISSING, Plane, Space

__all__ = ["AllocatorHistory", "allocator_histories"]


@dataclass(frozen=True)
class AllocatorHistory:
    """Memory of one allocator after each of its allocations and frees, in order of time.

    Attributes:
      device: name of the device, such as "GPU:0"; the allocator's name if it is not of one device.
      allocator: name of the allocator.
      time_ps: times since the base of the trace.
      allocated_bytes: memory in use.
      available_bytes: free memory of the allocator's pool.
      peak_bytes: the most memory in use since the process started.
    """

    device: str
    allocator: str
    time_ps: np.ndarray
    allocated_bytes: np.ndarray
    available_bytes: np.ndarray
    peak_bytes: np.ndarray


def allocator_histories(spaces: Sequence[Space], base_ns: int) -> Iterator[AllocatorHistory]:
    """Yields the history of each allocator; a trace without allocator events has none."""
    for space, prefix in zip(spaces, names_of(spaces), strict=True):
        for plane in (plane for plane in space.planes if plane.name == "/host:CPU"):
            yield from _of_plane(plane, prefix, base_ns)


_EVENTS: Final = ("MemoryAllocation", "MemoryDeallocation")
_DEVICE: Final = re.compile(r"(GPU|TPU)_(\d+)_\w+")
_COLUMNS: Final = ("bytes_allocated", "bytes_available", "peak_bytes_in_use")


def _of_plane(plane: Plane, prefix: str, base_ns: int) -> Iterator[AllocatorHistory]:
    keys = [key for key, name in plane.event_names.items() if name in _EVENTS]
    parts = [np.zeros((5, 0), np.int64)]
    for line in plane.lines if keys else ():
        events = line.events
        columns = [events.stats[name] for name in ("allocator_name", *_COLUMNS)]
        rows = np.flatnonzero(np.isin(events.metadata, keys) & (columns[0] != MISSING) & (columns[1] != MISSING))
        parts.append(np.stack([events.start_ps(base_ns)[rows], *(column[rows] for column in columns)]))
    time, name, *values = np.concatenate(parts, axis=1)
    for key in np.unique(name).tolist():
        rows = np.flatnonzero(name == key)
        rows = rows[np.argsort(time[rows], kind="stable")]
        allocator = plane.text(key)
        match = _DEVICE.match(allocator)
        device = f"{prefix}{match[1]}:{match[2]}" if match else f"{prefix}{allocator}"
        yield AllocatorHistory(device, allocator, time[rows], *(value[rows] for value in values))
