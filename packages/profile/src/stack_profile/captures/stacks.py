"""Samples the Python stacks of all threads, and records garbage collections, while a capture runs.

Another thread reads `sys._current_frames` at regular intervals. Times are those of the host's events in the
trace: nanoseconds since the epoch.

Code that holds the interpreter lock (GIL) is interrupted after Python's switch interval, by default 5 ms. Code that
holds it for less seems to be where it releases the lock, for example in the following call of JAX. A shorter interval
would show it, but an interval of 0.5 ms cost an engine that decodes on several threads 4% of its tokens/s.

CPython does not report waits for the lock. The sampling thread measures its delays: each sample has the time from the
thread's timer until it ran, and as a part of it the wait for a processor, which Linux counts.
"""

import array
import contextlib
import gc
import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, Final

from stack_profile.errors import CaptureError

__all__ = ["HIGHEST_HZ", "STACKS_HZ", "StackSampler"]

STACKS_HZ: Final = 20.0
HIGHEST_HZ: Final = 1000.0
# Processor time of a sample, 0.25% of a processor at the default rate. If samples take longer, because of many threads
# or deep stacks, the interval grows.
_MOST_SAMPLE_S: Final = 125e-6
_DEEPEST: Final = 200  # frames of a stack; the outermost of deeper stacks are missing
_MOST_RUNS: Final = 1_000_000
_MOST_PAUSES: Final = 100_000
_OWN_THREADS: Final = "capture-"  # start of the names of this package's threads


class StackSampler:
    """Sampling of this process from `start` to `stop`.

    Attributes:
      cpu_s: processor time of the sampling thread.
    """

    def __init__(self, hz: float = STACKS_HZ) -> None:
        """Prepares to sample `hz` times per second.

        Raises:
          CaptureError: `hz` is not positive or over 1000.
        """
        if not 0 < hz <= HIGHEST_HZ:
            raise CaptureError(f"stacks_hz is {hz:g}: give a rate up to {HIGHEST_HZ:g}, or 0 for no samples.")
        self._hz = hz
        self.cpu_s = 0.0
        self._ended = threading.Lock()
        self._thread = threading.Thread(target=self._sample, name="capture-stacks", daemon=True)
        self._times_ns = array.array("q")
        # For each sample: the time from the timer until the thread ran, and its part without a processor.
        self._late_ns, self._queued_ns = array.array("q"), array.array("q")
        self._counts_queue = False
        # Four numbers for each run of equal samples: thread, stack, first and last tick.
        self._runs = array.array("q")
        self._threads: dict[int, int] = {}
        self._names: list[str] = []
        # Frames as pairs (id of the code, offset of the instruction). The code objects are kept, so ids stay unique;
        # frames are not, because they would keep the program's arrays alive.
        self._stacks: dict[tuple[int, ...], int] = {}
        self._codes: dict[int, CodeType] = {}
        # Five numbers for each collection: start, end, generation, collected objects, thread.
        self._pauses = array.array("q")
        self._collecting_ns = 0
        self._is_running = False

    def start(self) -> None:
        self._ended.acquire()
        gc.callbacks.append(self._collected)
        self._is_running = True
        self._thread.start()

    def stop(self) -> None:
        """Ends sampling; later calls do nothing."""
        if not self._is_running:
            return
        self._is_running = False
        self._ended.release()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def content(self) -> bytes:
        """Returns the samples as compressed JSON, see `stack_profile.traces.host_stacks`; call it after `stop`."""
        self._thread.join()
        lines: dict[tuple[int, int], int] = {}
        frames: dict[tuple[str, int, str], int] = {}
        stacks = []
        for key in self._stacks:
            found = []
            for place in zip(key[::2], key[1::2], strict=True):
                if place not in lines:
                    code = self._codes[place[0]]
                    frame = (code.co_filename, _line(code, place[1]), code.co_qualname)
                    lines[place] = frames.setdefault(frame, len(frames))
                found.append(lines[place])
            stacks.append(found)
        main = threading.main_thread().ident
        threads = [
            {"ident": ident, "name": name, "main": ident == main, "own": name.startswith(_OWN_THREADS)}
            for ident, name in zip(self._threads, self._names, strict=True)
        ]
        content = {
            "hz": self._hz,
            "cpu_s": self.cpu_s,
            "times_ns": [now - before for before, now in pairwise([0, *self._times_ns])],
            "late_ns": self._late_ns.tolist(),
            "queued_ns": self._queued_ns.tolist() if self._counts_queue else None,
            "threads": threads,
            "frames": list(frames),
            "stacks": stacks,
            "runs": self._runs.tolist(),
            "pauses": self._pauses.tolist(),
        }
        return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 3)

    def _sample(self) -> None:
        sampler, interval_s, mean_s = threading.get_ident(), 1 / self._hz, 0.0
        open_runs: dict[int, int] = {}  # place of each thread's last run
        queued = _QueuedTime()
        self._counts_queue, queued_ns = queued.is_known, queued.ns()
        while True:
            timeout_s, asked_ns = interval_s * max(1.0, mean_s / _MOST_SAMPLE_S), time.perf_counter_ns()
            # `acquire` instead of an event's `wait`, which is written in Python.
            if self._ended.acquire(timeout=timeout_s):
                break
            late_ns = max(time.perf_counter_ns() - asked_ns - int(timeout_s * 1e9), 0)
            if len(self._runs) < 4 * _MOST_RUNS:
                self._tick(sampler, open_runs)
                # Reading the file releases the interpreter lock, so it comes after the sample, once.
                earlier_ns, queued_ns = queued_ns, queued.ns()
                self._late_ns.append(late_ns)
                self._queued_ns.append(queued_ns - earlier_ns)
            used_s = time.thread_time()
            mean_s += 0.1 * (used_s - self.cpu_s - mean_s)
            self.cpu_s = used_s
        queued.close()
        self._ended.release()

    def _tick(self, sampler: int, open_runs: dict[int, int]) -> None:
        """Adds one sample of each thread."""
        frames = sys._current_frames()
        tick = len(self._times_ns)
        self._times_ns.append(time.time_ns())
        for ident, top in frames.items():
            if ident == sampler:
                continue
            frame: FrameType | None = top
            key: list[int] = []
            codes: list[CodeType] = []
            while frame is not None and len(codes) < _DEEPEST:
                code = frame.f_code
                codes.append(code)
                key += (id(code), frame.f_lasti)
                frame = frame.f_back
            stack = self._stacks.get(tuple(key))
            if stack is None:
                stack = self._stacks[tuple(key)] = len(self._stacks)
                self._codes.update(zip(key[::2], codes, strict=True))
            place = open_runs.get(ident, -1)
            if place >= 0 and self._runs[place + 1] == stack and self._runs[place + 3] == tick - 1:
                self._runs[place + 3] = tick
                continue
            open_runs[ident] = len(self._runs)
            self._runs.extend((self._thread_of(ident), stack, tick, tick))

    def _thread_of(self, ident: int) -> int:
        """Returns the number of a thread, which is named when it is seen first: it may have ended later."""
        if ident not in self._threads:
            self._threads[ident] = len(self._threads)
            found = (thread.name for thread in threading.enumerate() if thread.ident == ident)
            self._names.append(next(found, f"thread {ident}"))
        return self._threads[ident]

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        now_ns = time.time_ns()
        if phase == "start":
            self._collecting_ns = now_ns
        elif self._collecting_ns and len(self._pauses) < 5 * _MOST_PAUSES:
            ident = threading.get_ident()
            self._pauses.extend((self._collecting_ns, now_ns, info["generation"], info["collected"], ident))
            self._collecting_ns = 0


class _QueuedTime:
    """Time for which the calling thread was ready to run without a processor; only Linux counts it."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    @property
    def is_known(self) -> bool:
        return self._file is not None

    def ns(self) -> int:
        """Returns nanoseconds since the start of the thread; 0 if unknown."""
        return 0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _line(code: CodeType, offset: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line is not None)
    return next(lines, code.co_firstlineno)
