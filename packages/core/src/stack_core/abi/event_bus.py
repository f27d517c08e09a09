"""Delivery of a run's events to its observers, which can neither fail nor block the run."""

import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stack_core.abi.errors import PluginError, StackError
from stack_core.abi.events import Event, StepFinished, StepStarted
from stack_core.abi.observers import Observer, ObservesInLoop
from stack_core.abi.registry import Registry

__all__ = ["EventBus", "ObserverContext", "observers_from"]

_QUEUED_EVENTS = 1000


@dataclass(frozen=True)
class ObserverContext:
    """Information for the construction of an observer.

    Attributes:
      directory: the run's directory.
      config: the resolved config of the run.
      terminal: whether the observer may draw progress on a terminal.
    """

    directory: Path
    config: Any
    terminal: bool


@dataclass
class EventBus:
    """A bus that delivers each event to every observer; an observer that fails or hangs is dropped with a warning.

    Each observer has its own thread and bounded queue. Step events are only queued. For other events `emit` returns
    after the observers have handled them in turn, so a report sees the metrics written before.
    `ObservesInLoop` observers are called in the caller's thread instead.

    Attributes:
      observers: observers that have not been dropped.
      limit_s: maximum seconds that an observer may block the run before it is dropped.
    """

    observers: list[Observer] = field(default_factory=list)
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        self._lanes = [_Lane(observer, self.limit_s) for observer in self.observers]

    def emit(self, event: Event) -> None:
        wait = not isinstance(event, (StepStarted, StepFinished))
        for lane in tuple(self._lanes):
            lane.call(partial(lane.observer.observe, event), wait=wait)
            self._drop_failed(lane)

    def flush(self) -> None:
        """Waits until all queued events are handled."""
        for lane in tuple(self._lanes):
            lane.call(_nothing, wait=True)
            self._drop_failed(lane)

    def close(self) -> None:
        for lane in tuple(self._lanes):
            lane.call(lane.observer.close, wait=True)
            self._drop_failed(lane)
            lane.end()
        self._lanes.clear()
        self.observers.clear()

    def __enter__(self) -> "EventBus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _drop_failed(self, lane: "_Lane") -> None:
        if lane.problem is not None:
            self._lanes.remove(lane)
            self.observers.remove(lane.observer)
            lane.end()
            name = type(lane.observer).__name__
            warnings.warn(f"Observer {name} failed and is left out: {lane.problem}", stacklevel=3)


class _Lane:
    """The calls of one observer, in order, executed by a thread that starts with the first call.

    Attributes:
      problem: why the observer was dropped; None while it works.
    """

    def __init__(self, observer: Observer, limit_s: float) -> None:
        self.observer = observer
        self.problem: str | None = None
        self._limit_s = limit_s
        self._calls: queue.Queue[tuple[Callable[[], None], threading.Event] | None] = queue.Queue(_QUEUED_EVENTS)
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None], *, wait: bool) -> None:
        """Queues a call, or executes it immediately for an `ObservesInLoop`; blocks for at most `limit_s`."""
        if isinstance(self.observer, ObservesInLoop):
            self._guarded(function)
            return
        if self._thread is None:
            # A daemon thread, since a hanging observer must not keep the process alive.
            self._thread = threading.Thread(target=self._work, name=type(self.observer).__name__, daemon=True)
            self._thread.start()
        until_s, done = time.monotonic() + self._limit_s, threading.Event()
        try:
            self._calls.put((function, done), timeout=self._limit_s)
        except queue.Full:
            self.problem = f"it is {_QUEUED_EVENTS:,} events behind and handled none of them in {self._limit_s:g} s."
            return
        if wait and not done.wait(max(0.0, until_s - time.monotonic())) and self.problem is None:
            self.problem = f"it kept the run waiting for {self._limit_s:g} s."

    def end(self) -> None:
        """Lets the thread finish after the queued calls; does not wait."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the thread hangs, and ends with the process
                self._calls.put_nowait(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            function, done = item
            if self.problem is None:
                self._guarded(function)
            done.set()

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # An observer, possibly third-party, must never fail the run.
            self.problem = f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """Does nothing; marks a position in a queue."""


def observers_from(registry: Registry[Any], context: ObserverContext, *, first: bool = True) -> list[Observer]:
    """Builds the observers for `context`; observers that cannot be built are dropped with a warning.

    Args:
      registry: functions from the context to an observer or None, by name.
      first: whether this is the run's first process; others have only entries with the detail `every_process`.

    Raises:
      StackError: an observer rejects the run's config.
    """
    names = [entry.name for entry in registry.entries() if first or entry.details.get("every_process")]
    built = (_built(registry, name, context) for name in names)
    return [observer for observer in built if observer is not None]


def _built(registry: Registry[Any], name: str, context: ObserverContext) -> Observer | None:
    try:
        return registry[name](context)
    except PluginError as error:
        problem = str(error)
    except StackError:
        raise
    except Exception as error:  # An observer, possibly third-party, must never fail the run.
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"Observer {name!r} cannot be made and is left out: {problem}", stacklevel=4)
    return None
