"""Coordination of several processes that execute one run: joining, agreement, and a common end.

JAX connects the processes; messages other than arrays go through the key-value store of its coordinator. A run in one
process uses `ALONE`, for which all methods are trivial.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from stack_core.abi.config import differences
from stack_core.abi.errors import ConfigError, Interrupted, StackError, TrainingError
from stack_core.runtime.rendezvous import ProcessesConfig, meet
from stack_core.runtime.signals import StopRequest

__all__ = ["ALONE", "Processes", "ProcessesConfig", "join", "joined"]

T = TypeVar("T")

_FAILED = "stack/failed"
_READ_MS = 1000  # interval between checks for a failure of other processes
_ARRAYS_S = 0.001  # interval between checks of pending arrays
_FAREWELL_S = 10.0
_STEPS_AHEAD = 2


def join(config: ProcessesConfig) -> "Processes":
    """Joins this process to a run; returns the existing membership if it has already joined.

    Call it before JAX uses a device.

    Raises:
      ConfigError: the settings are inconsistent, within this process or between processes.
      TrainingError: other processes did not arrive within `start_timeout_s`, or JAX was used before.
    """
    if jax.distributed.is_initialized():
        return _joined()
    place = config.resolved(os.environ)
    if place.count == 1:
        return ALONE
    meet(place)
    # By default, JAX's coordinator listens on all interfaces.
    bind = None if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") else place.coordinator
    # Its SIGTERM handler would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.id,
            coordinator_bind_address=bind,
            initialization_timeout=place.start_timeout_s,
            heartbeat_timeout_seconds=place.heartbeat_timeout_s,
            # The position is resolved already, and JAX's own detection might differ.
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise TrainingError(f"Process {place.id} cannot join the {place.count} of this run: {error}") from error
    jax.devices()  # initializes the backends together, before any process can have failed
    return _joined()


def joined() -> "Processes":
    """Returns the membership of this process, after `join`; `ALONE` for a run in one process."""
    return _joined() if jax.distributed.is_initialized() else ALONE


@functools.cache
def _joined() -> "Processes":
    from jax._src.distributed import global_state  # JAX has no public way to its key-value store

    return Processes(global_state.process_id, global_state.num_processes, global_state.client)


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as seen by one process.

    Collective methods must be called by all processes in the same order.

    Attributes:
      id: id of this process; the first, 0, writes the run's files.
      count: number of processes.
    """

    id: int = 0
    count: int = 1
    _store: Any = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _gathered: list[str] = field(default_factory=list)  # names of stored byte strings

    @property
    def first(self) -> bool:
        return self.id == 0

    def name(self, label: str) -> str:
        """Returns a fresh name for the next operation, equal in all processes."""
        return f"stack/{next(self._numbers)}/{label}"

    def in_turn(self, label: str, function: Callable[[], T]) -> T:
        """Calls a function in the first process, then in all other processes, which find its results on disk."""
        name = self.name(label)
        if not self.first:
            self._awaited(name)
        result = function()
        if self.first and self._store is not None:
            self._store.key_value_set(name, "done")
        return result

    def on_first(self, label: str, function: Callable[[], T]) -> T:
        """Returns the first process's result of a function to all processes, as JSON."""
        if self._store is None:
            return function()
        name = self.name(label)
        if self.first:
            self._store.key_value_set(name, json.dumps(function()))
        return json.loads(self._awaited(name))

    def from_each(self, label: str, value: T) -> list[T]:
        """Gathers the values of all processes in order of their ids, as JSON."""
        if self._store is None:
            return [value]
        name = self.name(label)
        self._store.key_value_set(f"{name}/{self.id}", json.dumps(value))
        return [json.loads(self._awaited(f"{name}/{each}")) for each in range(self.count)]

    def bytes_from_each(self, label: str, value: bytes) -> list[bytes]:
        """Gathers byte strings of all processes in order of their ids.

        The coordinator holds a byte string until the second call after it.
        """
        if self._store is None:
            return [value]
        name = self.name(label)
        self._store.key_value_set_bytes(f"{name}/{self.id}", value)
        found = [
            self._awaited(f"{name}/{each}", self._store.blocking_key_value_get_bytes) for each in range(self.count)
        ]
        # Every process has called this again, so it has all values of the call before.
        while self._gathered:
            self._store.key_value_delete(self._gathered.pop())
        self._gathered.append(f"{name}/{self.id}")
        return found

    def check_alike(self, label: str, value: Mapping[str, Any]) -> None:
        """Checks that a mapping of plain values equals the first process's mapping.

        Raises:
          ConfigError: the mappings differ; names each key.
        """
        lines = differences(dict(value), self.on_first(label, lambda: dict(value))) if self._store else []
        if lines:
            listing = "\n  ".join(lines)
            raise ConfigError(
                f"The {label} of process {self.id} differs from process 0 (its own value, not process 0's):\n  "
                f"{listing}\nStart all {self.count} processes with the same {label}."
            )

    def agree_on_stop(self, name: str, step: int, stop: StopRequest) -> bool:
        """Returns whether the run stops after `step` steps.

        All processes stop at the same step, by the first signal to any of them. A process that received a signal after
        step k proposes step k + 2. No other process can be past it: to dispatch step k + 3, a process must have read
        the results of step k + 1, which requires that this process has continued.

        Args:
          name: unique name of the agreement, from `name`.
          step: last dispatched step; at most one earlier step is unfinished.
        """
        if self._store is None:
            return bool(stop)
        agreed = self._read(name)
        if agreed is None and stop.received is not None:
            agreed = self._offer(name, f"{stop.received.name} {step + _STEPS_AHEAD}")
        signal_name, _, last = (agreed or "").partition(" ")
        if agreed is None or step < int(last):
            return False
        stop.received = signal.Signals[signal_name]
        return True

    def ready(self, arrays: Any) -> Any:
        """Waits for arrays that all processes compute, and returns them.

        Raises:
          TrainingError: another process failed meanwhile.
        """
        if self._store is not None:
            leaves: list[Any] = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
            self.until(lambda: all(leaf.is_ready() for leaf in leaves))
        return arrays

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` is true.

        Raises:
          TrainingError: another process failed meanwhile.
        """
        look_s = time.monotonic() + _READ_MS / 1000
        while not condition():
            time.sleep(_ARRAYS_S)
            if time.monotonic() >= look_s:
                self._raise_failure()
                look_s = time.monotonic() + _READ_MS / 1000

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function that blocks on the other processes, in a thread, while watching for their failures.

        Raises:
          TrainingError: another process failed meanwhile.
        """
        if self._store is None:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # a pool's threads would be joined at exit
        self.until(future.done)
        return future.result()

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Propagates an exception of the block to the other processes.

        An exception caused by another process's failure becomes a `TrainingError`. After a failure the interpreter
        exits without JAX's shutdown, which would wait for all processes and then abort.
        """
        try:
            yield
        except Interrupted:  # raised in all processes at the same step
            raise
        except BaseException as error:  # including Ctrl-C, of which all processes are notified
            if self._store is None:
                raise
            caused = self._cause(error)
            atexit.unregister(_leave)
            # Handlers run in reverse order, so the last one registered precedes JAX's shutdown.
            atexit.register(_leave, self, 2 if isinstance(caused, StackError) else 1)
            if caused is error:
                raise
            raise caused from error

    def _cause(self, error: BaseException) -> BaseException:
        """Returns the exception to raise: the error itself, or a report that another process failed or is gone."""
        lost = not isinstance(error, StackError) and any(sign in str(error) for sign in _LOST)
        try:
            if lost:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may be about to report the cause
                    self._store.blocking_key_value_get(_FAILED, _READ_MS)
            failure = self._offer(_FAILED, f"{self.id} {type(error).__name__}: {error}")
        except jax.errors.JaxRuntimeError:  # the coordinator is gone
            failure = f"{self.id} "
        if not failure.startswith(f"{self.id} ") and not isinstance(error, StackError):
            return _failure(failure)
        if lost:
            return TrainingError(
                f"Process {self.id} has lost another process of this run, which ended without an error: {error}\n"
                "Check how the other processes ended, then restart all, with --resume if there is a checkpoint."
            )
        return error

    def _awaited(self, name: str, get: Callable[[str, int], Any] | None = None) -> Any:
        """Waits for the value that another process stores under a name, a string unless `get` reads bytes."""
        get = self._store.blocking_key_value_get if get is None else get
        while True:
            try:
                return get(name, _READ_MS)
            except jax.errors.JaxRuntimeError as error:
                # JAX has one class for every error of its store.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            self._raise_failure()

    def _raise_failure(self) -> None:
        if failure := self._read(_FAILED):
            raise _failure(failure)

    def _read(self, name: str) -> str | None:
        try:
            return self._store.key_value_try_get(name)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def _offer(self, name: str, value: str) -> str:
        """Stores a value unless another process was first; returns the stored value."""
        try:
            self._store.key_value_set(name, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return self._store.blocking_key_value_get(name, _READ_MS)


ALONE = Processes()
"""A run in a single process."""

_LOST = ("Gloo", "Connection closed by peer", "Connection reset", "Socket closed", "NCCL")


def _failure(text: str) -> TrainingError:
    process, _, reason = text.partition(" ")
    return TrainingError(f"Process {process} of this run failed: {reason}")


def _leave(processes: Processes, status: int) -> None:
    """Exits after a failure. The first process, which hosts the coordinator, waits until all have read the error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    until_s = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if not processes.first:
            processes._store.key_value_set(f"{_FAILED}/{processes.id}", "read")
        for other in range(1, processes.count) if processes.first else ():
            left_ms = max(1, int(1000 * (until_s - time.monotonic())))
            processes._store.blocking_key_value_get(f"{_FAILED}/{other}", left_ms)
    os._exit(status)
