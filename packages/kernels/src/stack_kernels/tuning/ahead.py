"""Compilation of many programs in threads before any of them is timed.

XLA compiles without Python's lock, so threads of the process that owns the device are enough: only tracing and lowering
take turns. A compilation that still runs disturbs a measurement: XLA tries kernels on the device.
"""

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

__all__ = ["compile_ahead"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def compile_ahead(
    jobs: Mapping[K, Callable[[], T]],
    *,
    threads: int,
    deadline_s: float,
    end_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, T | Exception]:
    """Runs compilations in threads.

    Args:
      jobs: functions that compile, by key; started in this order.
      threads: maximum number of threads.
      deadline_s: time on `clock` after which no function starts.
      end_s: time on `clock` until which the call waits for running functions, by default `deadline_s`. A function that
        takes longer continues in its thread, and its result is lost.
      clock: function that returns the time in seconds.

    Returns:
      The result of each function, or the exception that it raised, by key.
    """
    waiting: queue.SimpleQueue[K] = queue.SimpleQueue()
    for key in jobs:
        waiting.put(key)
    finished: queue.SimpleQueue[tuple[K, T | Exception] | None] = queue.SimpleQueue()

    def work() -> None:
        while clock() < deadline_s:
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                finished.put((key, jobs[key]()))
            except Exception as error:  # any failure of a compiler is the result
                finished.put((key, error))
        finished.put(None)

    # Daemons: a compilation that hangs must not keep the process from ending.
    running = max(min(threads, len(jobs)), 0)
    for _ in range(running):
        threading.Thread(target=work, daemon=True).start()
    found: dict[K, Any] = {}
    end_s = deadline_s if end_s is None else end_s
    while running:
        try:
            result = finished.get(timeout=max(end_s - clock(), 0.0))
        except queue.Empty:
            break
        if result is None:
            running -= 1
        else:
            found[result[0]] = result[1]
    return {key: found[key] for key in jobs if key in found}
