"""An engine in its own process; `process.py` is the side of the server."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineStopped
from stack_core.abi.generation import EngineStats, GenerationRequest
from stack_core.runtime.outbox import Outbox
from stack_core.runtime.raised import Raised

__all__ = ["EngineProperties", "Failure", "HostedReplica", "OpenEngine", "Progress", "Result"]

OpenEngine = Callable[[Callable[[str, int, int], None]], Engine]
"""Constructs the engine, given a callback for the progress of compilation."""

_CALLS_AT_ONCE = 8
_MOST_WAITING = 2**31


@dataclass(frozen=True)
class Result:
    """Result of the call `number`: a value, or a `Raised`."""

    number: int
    value: Any


@dataclass(frozen=True)
class Progress:
    """Progress of compilation: the program compiled last, and the numbers of compiled and of all programs."""

    program: str
    compiled: int
    total: int


@dataclass(frozen=True)
class Failure:
    """The engine has failed, for example by an error of its device; its process is of no more use."""

    cause: str


@dataclass(frozen=True)
class EngineProperties:
    """Constant properties of an engine: its limits (see `LLMEngine`) and the adapters that it was started with."""

    limits: Any
    adapters: tuple[str, ...]


class HostedReplica:
    """An engine as the object of a mesh. It emits lists of updates, `EngineStats`, `Result`, `Progress` and `Failure`.

    `submit` and `abort` are executed in the order of their commands. Other methods of the engine go through `call`, on
    a thread, because they may take long.

    Args:
      open_engine: function that constructs the engine.
      emit: sends a list to the server.
      numerics: options of JAX that change sampled tokens, as set in the server.
      cores: CPU cores to which this process is bound; empty means all.

    Raises:
      StackError: the engine cannot be constructed.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        emit: Callable[[Any], None],
        numerics: Mapping[str, Any],
        cores: Sequence[int],
    ) -> None:
        if cores:
            # A thread inherits the cores of its parent, and those that exist are bound one by one.
            for task in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)
        for name, value in numerics.items():
            jax.config.update(name, value)
        self._engine: Engine | None = None
        self._sent: EngineStats | Failure | None = None
        self._outbox = Outbox(emit, self._changed_stats)
        engine = open_engine(lambda program, compiled, total: self._outbox.put(Progress(program, compiled, total)))
        # Every request may wait here: the server limits how many do.
        engine.expect(_MOST_WAITING)
        self._engine = engine
        self._calls = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="call")

    def start(self, compile_with: str | None) -> EngineProperties:
        """Compiles programs with a method of the engine ("prepare" or "warm_up"), and starts it."""
        engine: Any = self._engine
        if compile_with is not None:
            getattr(engine, compile_with)()
        engine.start()
        return EngineProperties(engine.limits, engine.adapters)

    def submit(self, request: GenerationRequest) -> None:
        assert self._engine is not None
        self._engine.submit(request, self._outbox.put)

    def abort(self, request_id: str) -> None:
        assert self._engine is not None
        self._engine.abort(request_id)

    def call(self, number: int, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Calls a method of the engine on a thread; its result is emitted."""
        self._calls.submit(self._call, number, partial(getattr(self._engine, method), *arguments, **keywords))

    def close(self, drain_s: float) -> None:
        engine, self._engine = self._engine, None
        assert engine is not None
        engine.close(drain_s=drain_s)
        self._calls.shutdown(wait=True, cancel_futures=True)
        self._outbox.close()  # the server gets every update before the answer to this call

    def _call(self, number: int, function: Callable[[], Any]) -> None:
        try:
            value = function()
        except Exception as error:  # an engine may raise anything; the server raises it from its own call
            value = Raised.of(error)
        self._outbox.put(Result(number, value))

    def _changed_stats(self) -> list[EngineStats | Failure]:
        engine = self._engine
        if engine is None:
            return []
        try:
            found: EngineStats | Failure = engine.stats()
        except EngineStopped as error:
            found = Failure(str(error))
        if found == self._sent:
            return []
        self._sent = found
        return [found]
