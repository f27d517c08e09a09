"""The server's side of an engine in its own process."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import jax

from stack_core.abi.errors import ClusterError, EngineStopped, StackError
from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.hosted_engine import NUMERICS
from stack_core.runtime.object_process import Arguments, ObjectProcess
from stack_core.runtime.raised import Raised
from stack_serve.llm.new_weights import KeysOfOldWeights
from stack_serve.parallel.devices import EngineDevices
from stack_serve.parallel.hosted import EngineProperties, Failure, Handover, OpenEngine, Progress, Result, host_engine

__all__ = ["ReplicaProcess"]

_CLOSE_S = 10.0  # for the engine to finish its step and to end its requests


class ReplicaProcess:
    """One engine process, which is never restarted. Methods may be called from any thread.

    An engine over several hosts has a process on each. All end together.

    Args:
      devices: devices of the process, on each host.
      open_engine: function that constructs the engine in each process, sent by cloudpickle.
      cluster: hosts of the engine.
      count: number of devices on all hosts; None is the first device of a process on one host.
      name: name of the engine for messages.
      receive: called with each update on a thread of this object; it must not block.
      progress: called with the progress of compilation.
      on_end: called once when the process is gone, with the cause unless it was closed.

    Attributes:
      stats: latest statistics of the engine; None before the first.
      properties: constant properties of the engine, after `start`.
    """

    def __init__(
        self,
        devices: EngineDevices,
        open_engine: OpenEngine,
        *,
        cluster: ClusterConfig,
        count: int | None = None,
        name: str,
        receive: Callable[[GenerationUpdate], None],
        progress: Callable[[Progress], None],
        on_end: Callable[[StackError | None], None],
    ) -> None:
        self._update, self._progress, self._on_end = receive, progress, on_end
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._results: dict[int, Future[Any]] = {}
        self._cause: StackError | None = None
        self.stats: EngineStats | None = None
        self.properties: EngineProperties | None = None
        numerics = {option: jax.config.values[option] for option in NUMERICS}
        self._process = ObjectProcess(
            cluster,
            {"data": count or 1},
            devices.environment,
            partial(host_engine, open_engine),
            lambda mesh: (numerics, devices.cores),
            name=name,
            receive=self._receive,
            on_end=self._end,
        )

    @property
    def pid(self) -> int | None:
        """The id of the process, of the first one if there are several."""
        return self._process.pid

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The id of the process on each host."""
        return self._process.pids

    @property
    def is_closed(self) -> bool:
        return self._cause is not None

    def start(self, compile_with: str | None, *, hands_over: bool = False) -> EngineProperties:
        """Waits until the engine is constructed, compiles its programs, and starts it; see `HostedReplica.start`.

        Raises:
          StackError: the process cannot start, or the engine cannot be constructed.
        """
        try:
            self._process.built.result()
            self.properties = self._process.call("start", compile_with, hands_over=hands_over).result()
        except BaseException as error:  # including Ctrl-C, which need not wait for a process that is starting
            self._process.close(wait=isinstance(error, Exception))
            raise
        assert self.properties is not None
        return self.properties

    def submit(
        self, request: GenerationRequest, on_error: Callable[[Exception], None], handover: Handover | None = None
    ) -> None:
        """Sends a request without waiting, with the pages that another engine offers.

        Args:
          on_error: called if the engine rejects the request, but not if the process is gone.
        """
        future = self._process.call("submit", request, handover)

        def check(result: "Future[Any]") -> None:
            error = result.exception()
            # The end of the process is reported by `on_end` for all of its requests.
            if isinstance(error, Exception) and self._cause is None:
                on_error(error)

        future.add_done_callback(check)

    def prefill(self, request: GenerationRequest, on_result: Callable[["Future[Any]"], None]) -> None:
        """Sends a prompt without waiting; see `HostedReplica.prefill`.

        Args:
          on_result: called with the finished future, unless the process is gone.
        """
        number, future = next(self._numbers), Future[Any]()

        def check(result: "Future[Any]") -> None:
            if self._cause is None:
                on_result(result)

        future.add_done_callback(check)
        with self._lock:
            self._results[number] = future
        self._process.call("prefill", number, request).add_done_callback(partial(self._check_sent, number))

    def abort(self, request_id: str) -> None:
        """Aborts a request without waiting."""
        self._process.call("abort", request_id)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls a method of the engine and waits for its result.

        Raises:
          EngineStopped: the process is gone.
          StackError: the method raised it.
        """
        return self._result("call", lambda mesh: (method, arguments, keywords))

    def receive_weights(self, params: Any) -> None:
        """Copies parameters to the process, which `use_weights` takes into use, and waits until they are placed.

        The arrays bypass the command stream and must not be deleted meanwhile. Raises as `call`.
        """
        self._result("receive_weights", lambda mesh: (mesh.pull(params),))

    def use_weights(self, weights: int, version: int, kv: KeysOfOldWeights) -> None:
        """Replaces the parameters by the received ones; see `HostedReplica.use_weights`. Raises as `call`."""
        self._result("use_weights", lambda mesh: (weights, version, kv))

    def drop_weights(self) -> None:
        """Frees the received parameters. Raises as `call`."""
        self._result("drop_weights", lambda mesh: ())

    def fail(self, cause: StackError) -> None:
        """Ends a process whose engine is of no more use; `on_end` gets the cause."""
        self._fail(cause)
        self._process.close(wait=False)

    def close(self, drain_s: float = 0.0) -> None:
        """Closes the engine and ends its process. An engine that does not close in time is killed."""
        with suppress(StackError, TimeoutError):
            self._process.call("close", drain_s).result(drain_s + _CLOSE_S)
        self._process.close()

    def _result(self, method: str, arguments: Arguments) -> Any:
        """Calls a method of the `HostedReplica` that emits a `Result`, and waits for its value."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._cause is not None:
                raise EngineStopped(str(self._cause))
            self._results[number] = future
        sent = self._process.call_with(method, lambda mesh: (number, *arguments(mesh)))
        sent.add_done_callback(partial(self._check_sent, number))
        return future.result()

    def _check_sent(self, number: int, sent: "Future[Any]") -> None:
        """Fails a call that could not be sent, for example because an argument cannot be pickled."""
        error = sent.exception()
        future = None if error is None else self._results.pop(number, None)
        if error is not None and future is not None:
            future.set_exception(error if self._cause is None else EngineStopped(str(self._cause)))

    # The methods below run on the thread that owns the process.

    def _receive(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, GenerationUpdate):
                self._update(value)
            elif isinstance(value, EngineStats):
                self.stats = value
            elif isinstance(value, Progress):
                self._progress(value)
            elif isinstance(value, Failure):
                self.fail(ClusterError(value.cause))
            elif isinstance(value, Result):
                future = self._results.pop(value.number)
                if isinstance(value.value, Raised):
                    future.set_exception(value.value.exception())
                else:
                    future.set_result(value.value)

    def _end(self, cause: StackError | None) -> None:
        self._fail(cause)

    def _fail(self, cause: StackError | None) -> None:
        """Fails all calls and reports the end, once."""
        with self._lock:
            if self._cause is not None:
                return
            self._cause = cause or EngineStopped("The engine was closed. Start another.")
            results, self._results = self._results, dict[int, Future[Any]]()
        for future in results.values():
            future.set_exception(EngineStopped(str(self._cause)))
        self._on_end(cause)
