"""Compilation of many programs in threads before any of them is timed.

XLA compiles without Python's lock, so threads of the process that owns the device are enough: only tracing and lowering
take turns. Nothing compiles during a measurement.
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
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, T | Exception]:
    """Runs functions that compile, in `threads` threads, in their order.

    No function starts after `deadline_s` of `clock`. The results are those that were complete then: a compilation that
    takes minutes continues in its thread without being waited for.

    Returns:
      Results by key, or the exception that the function raised.
    """
    waiting: queue.SimpleQueue[K] = queue.SimpleQueue()
    for key in jobs:
        waiting.put(key)
    finished: queue.SimpleQueue[tuple[K, T | Exception]] = queue.SimpleQueue()

    def work() -> None:
        while clock() < deadline_s:
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((key, jobs[key]()))
            except Exception as error:  # any failure of a compiler is the result
                finished.put((key, error))

    # Daemons: a compilation that hangs must not keep the process from ending.
    for _ in range(max(min(threads, len(jobs)), 0)):
        threading.Thread(target=work, daemon=True).start()
    found: dict[K, Any] = {}
    while len(found) < len(jobs):
        try:
            key, result = finished.get(timeout=max(deadline_s - clock(), 0.0))
        except queue.Empty:
            break
        found[key] = result
    return {key: found[key] for key in jobs if key in found}
