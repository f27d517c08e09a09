"""Python stacks of the host's threads, which a capture sampled, its garbage collections, and waits for the interpreter.

A sample shows where a thread was at one instant. The samples in a set of intervals are therefore an unbiased estimate
of where the thread spent them, however short the intervals are.
"""

import collections
import functools
import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from stack_profile.traces.instructions import Frame
from stack_profile.traces.intervals import union
from stack_profile.traces.xplane import Line, Space

__all__ = ["CallingSamples", "HostStacks", "Lateness", "Pauses", "Thread", "line_of", "read_host_stacks", "thread_of"]


@dataclass(frozen=True)
class Thread:
    """A thread of the process; `ident` is Python's, and `own` marks the profiler's threads."""

    ident: int
    name: str
    main: bool = False
    own: bool = False


@dataclass(frozen=True)
class Pauses:
    """Garbage collections, one per row; during one, no thread runs Python.

    Attributes:
      start_ps, end_ps: times since the base of the trace.
      generation: oldest generation that was collected.
      objects: number of collected objects.
    """

    start_ps: np.ndarray
    end_ps: np.ndarray
    generation: np.ndarray
    objects: np.ndarray


@dataclass(frozen=True)
class Lateness:
    """Delays of the sampling thread after its timer, one per sample. Any thread that gets ready then waits as long.

    Attributes:
      interpreter_ps: wait for the interpreter lock, without `processor_ps`.
      processor_ps: wait for a processor; None if the system does not count it, and then part of `interpreter_ps`.
    """

    interpreter_ps: np.ndarray
    processor_ps: np.ndarray | None


@dataclass(frozen=True)
class HostStacks:
    """Samples of one process.

    Attributes:
      threads: sampled threads.
      stacks: distinct stacks, innermost frame first.
      tick_ps: time of each sample since the base of the trace, ascending; a sample covers all threads.
      runs: equal consecutive samples of a thread, int64[runs, 4]: thread, stack, first and last tick.
      pauses: garbage collections.
      lateness: waits of the sampling thread that ended at `tick_ps`; None for captures of earlier versions.
    """

    threads: tuple[Thread, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    tick_ps: np.ndarray
    runs: np.ndarray
    pauses: Pauses
    lateness: Lateness | None = None

    def at_times(self, corrected: Callable[[np.ndarray], np.ndarray]) -> "HostStacks":
        """Returns the samples at corrected times."""
        pauses = replace(self.pauses, start_ps=corrected(self.pauses.start_ps), end_ps=corrected(self.pauses.end_ps))
        return replace(self, tick_ps=corrected(self.tick_ps), pauses=pauses)

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The line of each stack that stands for it, see `line_of`."""
        return tuple(map(line_of, self.stacks))

    def stack_at_ticks(self, thread: int) -> np.ndarray:
        """Returns the stack of a thread at each tick, -1 if it did not run Python code."""
        found = np.full(len(self.tick_ps), -1)
        for _, stack, first, last in self.runs[self.runs[:, 0] == thread].tolist():
            found[first : last + 1] = stack
        return found

    def lines_during(self, thread: int, intervals: np.ndarray) -> "collections.Counter[str]":
        """Counts the samples of a thread by line during disjoint rows (start, end) in order of time."""
        if not len(intervals):
            return collections.Counter()
        place = np.searchsorted(intervals[:, 0], self.tick_ps, "right") - 1
        return self.lines_at(thread, (place >= 0) & (self.tick_ps < intervals[place.clip(0), 1]))

    def lines_at(self, thread: int, ticks: np.ndarray) -> "collections.Counter[str]":
        """Counts the samples of a thread by line at a mask of ticks."""
        stacks = self.stack_at_ticks(thread)[ticks]
        return collections.Counter(self.lines[stack] for stack in stacks[stacks >= 0].tolist())

    def calling(self, space: Space) -> int | None:
        """Returns the thread with the most calls of JAX in the trace, otherwise the main thread; None if unknown."""
        calls: collections.Counter[int] = collections.Counter()
        for plane in (plane for plane in space.planes if plane.name == "/host:CPU"):
            called = [key for key, name in plane.event_names.items() if _CALL.match(name)]
            for line in plane.lines:
                thread = thread_of(line, self.threads)
                if thread is not None:
                    calls[thread] += int(np.isin(line.events.metadata, called).sum())
        if calls.total():
            return max(calls, key=lambda thread: calls[thread])
        return next((place for place, thread in enumerate(self.threads) if thread.main), None)


@dataclass(frozen=True)
class CallingSamples:
    """Samples of the thread of one process that calls JAX.

    Attributes:
      prefix: start of the names of the process's devices.
      stacks: samples of the process.
      thread: the thread.
    """

    prefix: str
    stacks: HostStacks
    thread: int

    def lines(self, intervals: np.ndarray) -> "collections.Counter[str]":
        """Counts the thread's samples by line during rows (start, end), which may overlap."""
        return self.stacks.lines_during(self.thread, union(intervals[:, 0], intervals[:, 1]))


_CALL: Final = re.compile(r"PjitFunction|\w+LoadedExecutable::Execute")


def line_of(stack: Sequence[Frame]) -> str:
    """Returns the innermost line of the user's own code, or else of a package other than JAX and Python's library."""
    own = next((frame for frame in stack if not frame.package), None)
    packages = (frame for frame in stack if frame.package not in _LOW_LEVEL)
    found = own or next(packages, stack[0] if stack else None)
    return str(found) if found else ""


_LOW_LEVEL: Final = ("jax", "jaxlib", "numpy", "python3")


def thread_of(line: Line, threads: Sequence[Thread]) -> int | None:
    """Returns the Python thread of a host's line, or None.

    XLA numbers a line by the C++ hash of its thread. That is a MurmurHash of the POSIX thread with GNU's library, and
    the thread itself with LLVM's.
    """
    for place, thread in enumerate(threads):
        if line.id in (thread.ident, _hash(thread.ident)):
            return place
    return None


@functools.lru_cache(maxsize=4096)
def _hash(ident: int) -> int:
    """Computes `std::hash<std::thread::id>` of GNU's C++ library: 64-bit MurmurHash2 of 8 bytes."""
    multiplier, mask = 0xC6A4A7935BD1E995, (1 << 64) - 1
    word = ident * multiplier & mask
    word = (word ^ word >> 47) * multiplier & mask
    found = ((0xC70F6907 ^ 8 * multiplier & mask) ^ word) * multiplier & mask
    found = (found ^ found >> 47) * multiplier & mask
    return found ^ found >> 47


def read_host_stacks(file: Path, base_ns: int, damage: list[str]) -> HostStacks | None:
    """Reads the samples of a process.

    Args:
      file: the samples' file, which need not exist.
      base_ns: zero of the trace's clock.
      damage: receives the reason why a file cannot be read.
    """
    try:
        content = json.loads(gzip.decompress(file.read_bytes()))
        return _host_stacks(content, base_ns)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        damage.append(f"{file.name}, the sampled Python stacks, cannot be read: {error!r}")
        return None


def _host_stacks(content: Mapping[str, Any], base_ns: int) -> HostStacks:
    frames = [Frame(*frame) for frame in content["frames"]]
    pauses = np.array(content["pauses"], np.int64).reshape(-1, 5)
    start, end = ((pauses[:, column] - base_ns) * _PS for column in (0, 1))
    return HostStacks(
        threads=tuple(Thread(each["ident"], each["name"], each["main"], each["own"]) for each in content["threads"]),
        stacks=tuple(tuple(frames[frame] for frame in stack) for stack in content["stacks"]),
        tick_ps=(np.cumsum(np.array(content["times_ns"], np.int64)) - base_ns) * _PS,
        runs=np.array(content["runs"], np.int64).reshape(-1, 4),
        pauses=Pauses(start, end, pauses[:, 2], pauses[:, 3]),
        lateness=_lateness(content) if content.get("late_ns") else None,
    )


def _lateness(content: Mapping[str, Any]) -> Lateness:
    late = np.array(content["late_ns"], np.int64) * _PS
    if content["queued_ns"] is None:
        return Lateness(late, None)
    # The count begins shortly before the timer.
    queued = np.minimum(np.array(content["queued_ns"], np.int64) * _PS, late)
    return Lateness(late - queued, queued)


_PS: Final = 1000
