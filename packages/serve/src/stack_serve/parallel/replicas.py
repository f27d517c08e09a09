"""The engine processes of a server. Adapters, weights and sleep apply to all processes."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import jax

from stack_core.abi.adapters import Adapters
from stack_core.abi.errors import ClusterError, EngineStopped, GenerationError, StackError, nearest
from stack_core.abi.generation import GenerationUpdate
from stack_serve.llm.new_weights import KeysOfOldWeights, check_params
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.devices import EngineDevices
from stack_serve.parallel.hosted import EngineProperties, OpenEngine, Progress
from stack_serve.parallel.process import ReplicaProcess
from stack_serve.parallel.weights import SharedWeights

__all__ = ["Replicas", "first_line"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MOST_STARTS = 3
_RESTART_S = 1.0


class Replicas:
    """Processes with one engine each. One that ends is started again, with the changes since the first start.

    Args:
      open_engine: function that constructs an engine in its process, sent by cloudpickle.
      parallel: numbers of engines and hosts.
      devices: devices of each engine.
      chips: number of devices of an engine.
      lock: lock of the caller, which guards `processes`.
      receive: called with the number of an engine and each of its updates.
      progress: called with the number of an engine and the progress of its compilation.
      on_end: called with the number of an engine, its process and the cause of its end, None if it was closed. The
        process is not among `processes` if it ended while it was starting.

    Attributes:
      processes: the process of each engine; None for an engine that is not running.
      adapters: number of each adapter, and its source if it was loaded after the first start.
      changes: orders what applies to all engines, and may be held for long.
      sleeping: level of sleep; None while the engines are awake.
      closing: True after `close`.
      failure: the reason if all engines that generate have failed.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        parallel: ParallelConfig,
        devices: Sequence[EngineDevices],
        *,
        chips: int,
        lock: threading.Condition,
        receive: Callable[[int, GenerationUpdate], None],
        progress: Callable[[int, Progress], None],
        on_end: Callable[[int, ReplicaProcess | None, StackError | None], None],
    ) -> None:
        self._open, self._parallel, self._devices, self._chips = open_engine, parallel, devices, chips
        self._lock, self._receive, self._progress, self._on_end = lock, receive, progress, on_end
        self.processes: list[ReplicaProcess | None] = [None] * parallel.engines
        self.adapters: dict[str, tuple[int, str | Adapters | None]] = {}
        self.changes = threading.RLock()
        self.sleeping: Literal[1, 2] | None = None
        self.closing = False
        self.failure: str | None = None
        self._adapter_numbers = itertools.count()
        self._weights = SharedWeights()
        self._given_up: set[int] = set()
        self._properties: EngineProperties | None = None

    @property
    def running(self) -> dict[int, ReplicaProcess]:
        """The running processes by number."""
        return {number: process for number, process in enumerate(self.processes) if process is not None}

    def start(self, compile_with: str | None) -> EngineProperties:
        """Starts all engines and returns the properties of the first one.

        Args:
          compile_with: method that compiles programs; None compiles none.
        """
        numbers = range(self._parallel.engines)
        try:
            processes = _on_threads([partial(self._start, number, compile_with) for number in numbers])
        except BaseException:  # including Ctrl-C: the processes that have started must not outlive this call
            self.close()
            raise
        properties = processes[0].properties
        assert properties is not None
        self.adapters = {name: (next(self._adapter_numbers), None) for name in properties.adapters}
        self._properties = properties
        return properties

    def restart(self, number: int) -> None:
        """Starts an engine again on another thread; gives it up after three attempts."""
        threading.Thread(target=self._restart, args=(number,), name=f"restart-{number}", daemon=True).start()

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            self.closing = True
            self._lock.notify_all()
        _on_threads([process.close for process in self.running.values()])

    def check_awake(self) -> None:
        """Raises an EngineStopped or a GenerationError if the engines take no requests."""
        if self.failure is not None:
            raise EngineStopped(self.failure)
        if self.closing:
            raise EngineStopped("The engines were closed. Start others.")
        if self.sleeping is not None:
            raise GenerationError("The engine sleeps. Wake it up first (wake_up).", parameter="engine")

    def adapter_number(self, name: str | None) -> int | None:
        """Returns the number of an adapter for page digests; None is the base model."""
        if name is None:
            return None
        if name not in self.adapters:
            raise GenerationError(
                f"There is no adapter {name!r}.{nearest(name, self.adapters)} There are: "
                f"{', '.join(self.adapters) or 'none'}.",
                parameter="adapter",
            )
        return self.adapters[name][0]

    def load_adapter(self, name: str, adapters: str | Adapters) -> None:
        """Registers an adapter in every engine, or in none."""
        with self.changes:
            try:
                self.call("load_adapter", name, adapters)
            except StackError:
                if name not in self.adapters:
                    self._unload_everywhere(name)
                raise
            self.adapters[name] = (next(self._adapter_numbers), adapters)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter from every engine."""
        with self.changes:
            self.adapter_number(name)
            del self.adapters[name]
            self._unload_everywhere(name)

    def update_weights(self, params: Any, kv: KeysOfOldWeights, *, version: int | None, donate: bool) -> None:
        """Replaces the parameters of all engines, or of none; see `ParallelEngine.update_weights`."""
        with self.changes:
            with self._lock:
                self.check_awake()
            assert self._properties is not None
            check_params(params, self._properties.parameters)
            weights = self._weights.updated(params, version)
            # Once, because each engine would place a host array anew.
            arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), params)
            self._place_weights(arrays)
            self._weights = weights
            if donate:
                for array in jax.tree.leaves(arrays):
                    array.delete()
            self._use_weights(kv)

    def sleep(self, level: Literal[1, 2]) -> None:
        """Frees the device memory of all engines, or of none. The caller holds `changes` and has set `sleeping`."""
        try:
            self.call("sleep", level)
        except Exception:  # whichever it is, the engines must be alike
            self._wake_with_weights(level)
            raise
        if level == 2:
            self._weights = self._weights.reset()

    def wake_up(self) -> None:
        """Allocates the memory of all engines again."""
        with self.changes:
            self.call("wake_up")
            self.sleeping = None

    def call(self, method: str, *arguments: Any) -> Mapping[int, Any]:
        """Calls a method of all running engines concurrently; an engine that ends meanwhile is left out.

        Raises:
          StackError: the first exception of an engine, after all calls have returned.
        """
        running = self.running

        def call(process: ReplicaProcess) -> Any:
            try:
                return process.call(method, *arguments)
            except EngineStopped as error:
                return error

        found = dict(zip(running, _on_threads([partial(call, each) for each in running.values()]), strict=True))
        return {number: value for number, value in found.items() if not isinstance(value, EngineStopped)}

    def _start(self, number: int, compile_with: str | None) -> ReplicaProcess:
        """Starts the process of an engine, which can then receive requests."""
        process: ReplicaProcess | None = None

        def on_end(cause: StackError | None) -> None:
            self._on_end(number, process, cause)

        parallel = self._parallel
        process = ReplicaProcess(
            self._devices[number],
            self._open,
            cluster=parallel.cluster,
            count=self._chips if parallel.hosts > 1 else None,
            name=f"engine {number}",
            receive=partial(self._receive, number),
            progress=partial(self._progress, number),
            on_end=on_end,
        )
        properties = process.start(compile_with, hands_over=parallel.engines > parallel.data_parallel)
        with self.changes:
            if self._properties is not None:  # a restart, after which the engine lacks later changes
                try:
                    self._repeat_changes(process, properties.adapters)
                except BaseException:  # whichever it is, nothing else refers to the process, which must end
                    process.close()
                    raise
            with self._lock:
                if process.is_closed:
                    raise EngineStopped(f"Engine {number} ended right after its start.")
                self.processes[number] = process
        return process

    def _restart(self, number: int) -> None:
        reason = ""
        for attempt in range(_MOST_STARTS):
            if self.closing:
                return
            try:
                process = self._start(number, "prepare")
            except StackError as error:
                _LOG.error("Engine %d cannot start: %s", number, error)
                reason = str(error)
                time.sleep(_RESTART_S * 2**attempt)
                continue
            if self.closing:
                process.close()
            return
        with self._lock:
            self._given_up.add(number)
            if self._given_up.issuperset(range(self._parallel.data_parallel)):
                self.failure = f"All engines that generate have failed, most recently engine {number}: {reason}"

    def _repeat_changes(self, process: ReplicaProcess, adapters: Sequence[str]) -> None:
        """Applies to a restarted engine the changes since the first start, when it had some `adapters`."""
        for name, (_, loaded) in self.adapters.items():
            if loaded is not None:
                process.call("load_adapter", name, loaded)
        for name in set(adapters) - set(self.adapters):
            process.call("unload_adapter", name)
        if self._weights.updates:
            self._catch_up(process)
        if self.sleeping is not None:
            process.call("sleep", self.sleeping)

    def _catch_up(self, process: ReplicaProcess) -> None:
        """Updates an engine from the weights of the checkpoint to the current weights."""
        for params in self._weights.changed:
            process.receive_weights(params)
        process.use_weights(self._weights.updates, self._weights.version, "keep")

    def _place_weights(self, params: Any) -> None:
        """Copies parameters to all engines; raises a GenerationError if one cannot hold them, and frees the copies."""
        refused = self._on_each(lambda process: process.receive_weights(params))
        if not refused:
            return
        self._on_each(lambda process: process.drop_weights())
        number, error = min(refused.items())
        raise GenerationError(
            f"Engine {number} cannot take the new weights, so no engine did. All answer with version "
            f"{self._weights.version}. The cause: {first_line(error)}",
            parameter="params",
        ) from error

    def _use_weights(self, kv: KeysOfOldWeights) -> None:
        """Replaces the parameters of all engines by the copied ones; an engine that fails to do so starts again."""
        weights = self._weights
        failed = self._on_each(lambda process: process.use_weights(weights.updates, weights.version, kv))
        if not failed:
            return
        self._end_failed(failed, f"take version {weights.version} of the weights")
        numbers, error = ", ".join(map(str, sorted(failed))), failed[min(failed)]
        raise GenerationError(
            f"Engine {numbers} did not take version {weights.version} of the weights and starts again with it. The "
            f"others answer with version {weights.version}. The cause: {first_line(error)}",
            parameter="params",
        ) from error

    def _wake_with_weights(self, level: Literal[1, 2]) -> None:
        """Wakes all engines up with the current weights after some could not sleep; requests are refused until then."""

        def wake_up(process: ReplicaProcess) -> None:
            process.call("wake_up")
            # An engine that fell asleep has read the checkpoint again.
            if level == 2 and self._weights.updates:
                self._catch_up(process)

        self._end_failed(self._on_each(wake_up), "wake up with the current weights")
        self.sleeping = None

    def _end_failed(self, failed: Mapping[int, Exception], task: str) -> None:
        """Ends engines that failed at a task; they start again with all changes."""
        for number, error in failed.items():
            process = self.processes[number]
            if process is not None:
                process.fail(ClusterError(f"it did not {task}: {error}"))

    def _on_each(self, action: Callable[[ReplicaProcess], None]) -> dict[int, Exception]:
        """Runs an action for all running engines concurrently and returns the exceptions by engine.

        An engine that ends meanwhile is left out: it starts again with all changes.
        """
        running = self.running

        def run(process: ReplicaProcess) -> Exception | None:
            try:
                action(process)
            except EngineStopped:
                return None
            except Exception as error:  # whichever it is, the caller must keep the engines alike
                return error
            return None

        errors = zip(running, _on_threads([partial(run, each) for each in running.values()]), strict=True)
        return {number: error for number, error in errors if error is not None}

    def _unload_everywhere(self, name: str) -> None:
        for process in self.running.values():
            try:
                process.call("unload_adapter", name)
            except (GenerationError, EngineStopped):
                continue  # it does not have the adapter, or has ended


def first_line(error: Exception) -> str:
    """Returns the message of an error without the traceback of another process."""
    return str(error).partition("\n")[0]


def _on_threads(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Calls functions concurrently and returns their results, or raises the first exception after all have ended."""
    if not functions:
        return []
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
    return [future.result() for future in futures]
