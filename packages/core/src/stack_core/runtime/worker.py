"""The worker: a forked process that runs one function of a formation and reports its progress."""

import importlib
import json
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TextIO

from stack_core.abi.errors import ClusterError, StackError
from stack_core.abi.events import Event, RunStarted, StepFinished, StepStarted
from stack_core.runtime.event_frames import to_frame
from stack_core.runtime.rendezvous import ProcessesConfig

__all__ = ["Order", "Worker", "current_worker", "work"]


@dataclass(frozen=True)
class Order:
    """The task of a forked worker.

    Attributes:
      formation: number of the formation.
      rank: rank of the worker in its formation.
      count: number of workers in the formation.
      coordinator: address of JAX's coordinator for this formation.
      target: "module:attribute" of the function; its result must be JSON-serializable.
      arguments: keyword arguments, JSON values.
    """

    formation: int
    rank: int
    count: int
    coordinator: str
    target: str
    arguments: Mapping[str, Any]

    @property
    def processes(self) -> ProcessesConfig:
        """The settings with which the processes of this formation find each other."""
        return ProcessesConfig(count=self.count, id=self.rank, coordinator=self.coordinator)


class Worker:
    """This process as a member of a formation; also an observer of its run."""

    in_loop: Final = True

    def __init__(self, order: Order, out: TextIO, driver: tuple[tuple[str, int], bytes]) -> None:
        self.order = order
        self.driver = driver
        self._out = out
        self._lock = threading.Lock()

    def say(self, **fields: Any) -> None:
        """Sends a message to the agent, which forwards it to the driver."""
        line = json.dumps(fields) + "\n"
        # Observers may run on several threads, whose lines must not mix.
        with self._lock:
            self._out.write(line)
            self._out.flush()

    def observe(self, event: Event) -> None:
        """Forwards an event: every event of rank 0, but only the progress of other ranks."""
        if self.order.rank == 0:
            self.say(event=to_frame(event))
        if isinstance(event, (StepStarted, StepFinished)):
            self.say(step=event.step, completed=isinstance(event, StepFinished))
        elif isinstance(event, RunStarted):
            self.say(step=event.first_step, completed=True)

    def close(self) -> None:
        """Does nothing: the worker outlives its role as an observer."""


_current: Worker | None = None


def current_worker() -> Worker | None:
    """Returns the worker that this process is, or None in a process that no agent forked."""
    return _current


def work(order: Order, out: TextIO, driver: tuple[tuple[str, int], bytes]) -> int:
    """Runs the function of an order and reports its result or exception; returns the exit status.

    Args:
      driver: address and token of the driver, for functions that connect to it directly.
    """
    global _current  # noqa: PLW0603  a process is at most one worker, and nested code may report
    worker = _current = Worker(order, out, driver)
    worker.say(running=True)
    try:
        result = _resolved(order.target)(**order.arguments)
        worker.say(result=result)
    except BaseException as error:  # the driver needs the cause of any failure
        worker.say(
            error={
                "type": type(error).__name__,
                "message": str(error),
                "mendable": isinstance(error, StackError),
                "traceback": traceback.format_exc(),
            }
        )
        print(traceback.format_exc(), flush=True)  # noqa: T201  standard output is the log
        return 2 if isinstance(error, StackError) else 1
    return 0


def _resolved(target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ClusterError(f"A worker cannot import {target!r}: {error}. Install the same on all hosts.") from error
