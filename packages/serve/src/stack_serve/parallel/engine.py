"""Several engines of one model behind the interface of one, each in a process of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from stack_core.abi.adapters import Adapters
from stack_core.abi.engines import Engine, Pooling
from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError, StackError
from stack_core.abi.generation import (
    Constraint,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    RequestTimes,
)
from stack_serve.llm.compiled_programs import Progress as ReportProgress
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.group_checks import check_config, refusal_over_hosts
from stack_serve.llm.limits import Limits
from stack_serve.llm.new_weights import KeysOfOldWeights, check_policy
from stack_serve.llm.pages import extend_digests
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.devices import EngineDevices, devices_of_hosts, divide_devices
from stack_serve.parallel.hosted import Handover, OpenEngine, Progress
from stack_serve.parallel.process import ReplicaProcess
from stack_serve.parallel.replicas import Replicas, first_line
from stack_serve.parallel.router import Router

__all__ = ["ParallelEngine"]

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_MOST_REPLAYS = 1  # a request that ends every engine that computes it must not end all of them


@dataclass(eq=False)
class _Running:
    """A request in progress.

    Attributes:
      engine: number of the engine that computes it, or its prompt.
      load: number of continuations that it adds to the load of its engine.
      is_prefilled: True if the next engine continues the prompt.
      unfinished: indices of the unfinished continuations.
      is_streamed: True if an update was delivered; the request cannot be computed again after that.
      replays: number of times that it was given to another engine.
    """

    request: GenerationRequest
    receive: Callable[[GenerationUpdate], None]
    engine: int
    digests: list[bytes]
    submitted_s: float
    unfinished: set[int]
    load: int = 0
    is_prefilled: bool = False
    is_streamed: bool = False
    is_aborted: bool = False
    replays: int = 0


class ParallelEngine(Engine):
    """Data-parallel engines of one model, with the answers of one engine.

    Requests are validated here and sent without waiting to the engine that the router chooses. If an engine's process
    ends, its requests without output are computed by another engine and the others end with "error", while the process
    is started again with the same adapters and weights. Adapters, weights and sleep apply to all engines.

    With prefill engines, one of them computes the prompt of a request up to its last full page, and the engine that
    generates receives these pages by the runtime's transfer. If that fails, it computes the prompt itself.

    Args:
      open_engine: function that constructs an engine in its process, sent by cloudpickle.
      config: settings of each engine.
      parallel: numbers of engines, and the router.
      progress: callback of `prepare` and `warm_up` as in `LLMEngine`, with the programs of all engines.
      devices: devices of each engine; None divides those of the machine.

    Raises:
      HardwareError: there are too few devices.
    """

    keeps_missing = True

    def __init__(
        self,
        open_engine: OpenEngine,
        config: EngineConfig,
        parallel: ParallelConfig,
        *,
        progress: ReportProgress | None = None,
        devices: Sequence[EngineDevices] | None = None,
    ) -> None:
        self._count, self._decoding = parallel.engines, parallel.data_parallel
        chips = config.tensor * config.expert
        if parallel.hosts > 1:
            check_config(config, parallel.hosts)
            devices = [devices_of_hosts(parallel.hosts, chips)] if devices is None else devices
        self._config, self._progress, self._hosts = config, progress, parallel.hosts
        self._reports: dict[int, Progress] = {}
        self._lock = threading.Condition()  # guards requests, loads and the processes
        self._running: dict[str, _Running] = {}
        self._streams: dict[str, tuple[int, queue.SimpleQueue[GenerationUpdate]]] = {}
        self._loads = [0] * self._count
        self._limits: Limits | None = None
        self._router_name = parallel.router
        self._routers = self._make_routers(0)
        self._replicas = Replicas(
            open_engine,
            parallel,
            divide_devices(self._count, chips) if devices is None else devices,
            chips=chips,
            lock=self._lock,
            receive=self._receive,
            progress=self._report,
            on_end=self._end,
        )

    @property
    def limits(self) -> Limits:
        """Limits of the engines, after `prepare`."""
        assert self._limits is not None, "prepare() reads them"
        return self._limits

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that requests may select."""
        return tuple(self._replicas.adapters)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process ids of the engines; None for an engine that is not running."""
        return tuple(None if process is None else process.pid for process in self._replicas.processes)

    @property
    def running_engines(self) -> int:
        """Number of engines that run."""
        return len(self._replicas.running)

    def processes(self, engine: int) -> tuple[int | None, ...]:
        """Returns the process ids of one engine, one for each of its hosts; () if it is not running."""
        process = self._replicas.processes[engine]
        return () if process is None else process.pids

    def prepare(self) -> None:
        """Starts all engines, which compile enough programs to serve requests."""
        self._start_all("prepare")

    def warm_up(self) -> None:
        """Starts all engines, which compile all of their programs."""
        self._start_all("warm_up")

    def start(self) -> None:
        """Starts the engines if `prepare` or `warm_up` has not."""
        if self._limits is None:
            self._start_all(None)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` seconds for requests to finish, then ends all processes; see `Engine`."""
        deadline_s = time.monotonic() + drain_s
        with self._lock:
            while self._running and (left_s := deadline_s - time.monotonic()) > 0:
                self._lock.wait(left_s)
        self._replicas.close()

    def __enter__(self) -> "ParallelEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request on the engine that the router chooses; see `Engine`.

        Raises:
          GenerationError: the request is invalid, or its id is in use.
          EngineBusy: more than `max_waiting` continuations would wait for this engine, or no engine runs.
          EngineStopped: the engines were closed or failed.
        """
        self.limits.check(request)
        number = self._replicas.adapter_number(request.adapter)
        digests: list[bytes] = []
        if self._count > self._decoding or self._routers[0].uses_digests:
            page_tokens = self._config.page_tokens
            pages = (len(request.prompt) - 1) // page_tokens
            options = {"page_tokens": page_tokens, "pages": pages, "adapter": number, "images": request.images}
            extend_digests(digests, request.prompt, **options)
        updates = queue.SimpleQueue[GenerationUpdate]()
        unfinished = set(range(request.sampling.n))
        running = _Running(request, receive or updates.put, -1, digests, time.monotonic(), unfinished)
        # Log-probabilities of a prompt are computed with it, without cached pages.
        running.is_prefilled = not digests or request.sampling.prompt_logprobs is not None
        with self._lock:
            self._replicas.check_awake()
            name = request.request_id
            if name in self._running or name in self._streams:
                raise GenerationError(
                    f"Request {name!r} is still in progress. Give each request a unique id.", parameter="request_id"
                )
            self._check_room(request.sampling.n)
            running.is_prefilled |= self._routers[0].has(digests)
            process = self._assign(running)
            self._running[name] = running
            if receive is None:
                self._streams[name] = (request.sampling.n, updates)
        self._send(running, process, request)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request; see `Engine`. Closing the iterator early aborts the request."""
        if request_id not in self._streams:
            raise GenerationError(f"No request {request_id!r} was submitted for streaming, or it was streamed already.")
        unfinished, updates = self._streams[request_id]
        try:
            while unfinished:
                update = updates.get()
                unfinished -= update.finish_reason is not None
                yield update
        finally:
            self.abort(request_id)
            with self._lock:
                self._streams.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Aborts a request before its engine's next step; has no effect on a finished request."""
        with self._lock:
            running = self._running.get(request_id)
            if running is None:
                return
            running.is_aborted = True
            process = self._replicas.processes[running.engine]
        if process is not None:
            process.abort(request_id)

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: KeysOfOldWeights = "keep",
        donate: bool = False,
    ) -> None:
        """Replaces the parameters of all engines, or of none, and keeps those missing from `params`; see `Engine`.

        First every engine copies the parameters, while it continues with the old ones. Then each replaces them between
        two of its steps. This process keeps a copy in host memory for engines that start again.

        Raises:
          GenerationError: `kv` has an unknown value, an engine cannot hold the parameters, or an engine did not take
            them into use and therefore starts again; names the versions of the engines.
        """
        check_policy(kv)
        if self._hosts > 1:  # before the copies are sent
            raise GenerationError(refusal_over_hosts("New weights"))
        try:
            self._replicas.update_weights(params, kv, version=version, donate=donate)
        finally:
            self._forget_prefixes()

    def stats(self) -> EngineStats:
        """Returns the sums over the running engines, and the lowest version of their weights.

        Raises:
          EngineStopped: all engines have failed.
        """
        if self._replicas.failure is not None:
            raise EngineStopped(self._replicas.failure)
        found = [stats for stats in self.engine_stats() if stats is not None]
        sums = {each.name: sum(getattr(one, each.name) for one in found) for each in fields(EngineStats)}
        return EngineStats(**{**sums, "weights_version": min((one.weights_version for one in found), default=0)})

    def engine_stats(self) -> list[EngineStats | None]:
        """Returns the latest statistics of each engine; None for an engine that is not running."""
        return [None if process is None else process.stats for process in self._replicas.processes]

    def memory(self) -> str:
        """Returns the memory use of each process, as human-readable text."""
        found = self._replicas.call("memory")
        return "; ".join(f"engine {number}: {text}" for number, text in found.items())

    def compile_constraint(self, constraint: Constraint) -> None:
        """Compiles a constraint in every engine; see `Engine`."""
        self._replicas.call("compile_constraint", constraint)

    def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Pooling = "last") -> np.ndarray:
        """Computes the pooled hidden states of prompts on the least loaded engine; see `Engine`."""
        with self._lock:
            self._replicas.check_awake()
            loads = self._available(range(self._decoding))
            engine = min((load, number) for number, load in enumerate(loads) if load is not None)[1]
            process = self._replicas.processes[engine]
            self._loads[engine] += 1
        assert process is not None
        try:
            return process.call("embed", prompts, pooling=pooling)
        finally:
            with self._lock:
                self._loads[engine] -= self._replicas.processes[engine] is process

    def load_adapter(self, name: str, adapters: str | Adapters) -> None:
        """Registers an adapter in every engine, or in none; see `Engine`."""
        self._replicas.load_adapter(name, adapters)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter from every engine; see `Engine`."""
        self._replicas.unload_adapter(name)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the device memory of all engines, or of none; see `Engine`."""
        with self._replicas.changes:
            with self._lock:
                self._replicas.check_awake()
                if self._running or any(self._loads):
                    raise EngineBusy(
                        f"{len(self._running)} requests run. Let them finish, or abort them, before the engine sleeps.",
                        retry_after_s=_RETRY_AFTER_S,
                    )
                self._replicas.sleeping = level
            self._replicas.sleep(level)
            self._forget_prefixes()

    def wake_up(self) -> None:
        """Allocates the memory of all engines again; see `Engine`."""
        self._replicas.wake_up()

    def _start_all(self, compile_with: str | None) -> None:
        limits = self._replicas.start(compile_with).limits
        self._routers, self._limits = self._make_routers(limits.pages), limits

    def _make_routers(self, pages: int) -> tuple[Router, Router]:
        """Returns the routers of the engines that generate, and of the engines that compute prompts."""
        name = self._router_name
        return (
            Router(self._decoding, name, pages=pages),
            Router(self._count - self._decoding, name, pages=pages),
        )

    def _end(self, number: int, process: ReplicaProcess | None, cause: StackError | None) -> None:
        """Handles the end of a process, on the thread that owned it."""
        with self._lock:
            if process is None or self._replicas.processes[number] is not process:
                return  # it was starting, which raises there
            self._replicas.processes[number], self._loads[number] = None, 0
            is_prefill = number >= self._decoding
            self._routers[is_prefill].forget(number - self._decoding * is_prefill)
            lost = [running for running in self._running.values() if running.engine == number]
            for running in lost:
                running.load = 0
            restarts = cause is not None and not self._replicas.closing
        if cause is not None:
            _LOG.error("Engine %d ended and is started again: %s", number, cause)
        for running in lost:
            self._recover(running, number, cause)
        if restarts:
            self._replicas.restart(number)

    def _recover(self, running: _Running, number: int, cause: StackError | None) -> None:
        """Gives a request of an ended engine to another one, or ends it."""
        if cause is None or running.is_aborted:
            return self._finish(running, "abort", None)
        error = f"Engine {number} ended while it computed this request. Send it again. ({first_line(cause)})"
        if running.is_streamed or running.replays >= _MOST_REPLAYS:
            return self._finish(running, "error", error)
        running.replays += 1
        self._continue(running, error)
        return None

    def _continue(self, running: _Running, error: str, handover: Handover | None = None) -> None:
        """Sends a request with its remaining time to the next engine, or ends it without one."""
        request, left_s = running.request, None
        if request.timeout_s is not None:
            left_s = request.timeout_s - (time.monotonic() - running.submitted_s)
            if left_s <= 0:
                return self._finish(running, "deadline", None)
        try:
            with self._lock:
                process = self._assign(running)
        except StackError:
            return self._finish(running, "error", error)
        return self._send(running, process, replace(request, timeout_s=left_s), handover)

    def _send(
        self, running: _Running, process: ReplicaProcess, request: GenerationRequest, handover: Handover | None = None
    ) -> None:
        if running.engine < self._decoding:
            process.submit(request, partial(self._reject, running), handover)
        else:
            process.prefill(request, partial(self._hand_over, running))
        # `abort` may have reached the engine before the request.
        if running.is_aborted:
            process.abort(request.request_id)

    def _hand_over(self, running: _Running, result: "Future[Any]") -> None:
        """Sends a request whose prompt was computed to an engine that generates."""
        with self._lock:
            self._release(running)
            running.is_prefilled = True
        if running.is_aborted:
            return self._finish(running, "abort", None)
        if result.exception() is not None:
            _LOG.warning("Engine %d did not compute a prompt: %s", running.engine, result.exception())
        handover = None if result.exception() is not None else result.result()
        return self._continue(running, "No engine that generates runs. Send the request again.", handover)

    def _check_room(self, continuations: int) -> None:
        """Raises EngineBusy if too many continuations would wait; the caller holds the lock."""
        waiting = sum(self._loads) - self._config.max_sequences * self._decoding
        most = self._config.max_waiting * self._decoding
        if waiting > 0 and waiting + continuations > most:
            raise EngineBusy(
                f"{waiting} continuations wait already; the maximum is max_waiting={self._config.max_waiting} for each "
                f"of {self._decoding} engines. Try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _assign(self, running: _Running) -> ReplicaProcess:
        """Chooses the next engine of a request and adds the request to its load; the caller holds the lock.

        Raises:
          EngineBusy: no engine runs.
        """
        prefill = range(self._decoding, self._count)
        engines, router, count = range(self._decoding), self._routers[0], len(running.unfinished)
        if not running.is_prefilled and any(number in self._replicas.running for number in prefill):
            engines, router, count = prefill, self._routers[1], 1
        loads = self._available(engines)
        number = engines[router.choose(running.digests, loads, continuations=count)]
        self._loads[number] += count
        running.engine, running.load = number, count
        process = self._replicas.processes[number]
        assert process is not None
        return process

    def _release(self, running: _Running, count: int | None = None) -> None:
        """Subtracts a request, or some of its continuations, from the load of its engine; the caller holds the lock."""
        count = running.load if count is None else min(count, running.load)
        running.load -= count
        self._loads[running.engine] -= count

    def _available(self, engines: range) -> list[int | None]:
        """Returns the load of each of some engines, None if it is not running; raises EngineBusy if all are None."""
        running = self._replicas.running
        loads = [self._loads[number] if number in running else None for number in engines]
        if all(load is None for load in loads):
            raise EngineBusy("All engines are starting again. Try again later.", retry_after_s=5.0)
        return loads

    def _receive(self, number: int, update: GenerationUpdate) -> None:
        """Delivers an update of an engine, on the thread that owns its process."""
        running = self._running.get(update.request_id)
        if running is None or running.engine != number:
            return
        running.is_streamed = True
        self._deliver(running, update)

    def _deliver(self, running: _Running, update: GenerationUpdate) -> None:
        if update.finish_reason is not None and update.index in running.unfinished:
            with self._lock:
                running.unfinished.discard(update.index)
                self._release(running, 1)
                # Before the delivery: a client may submit the id again as soon as it gets the last update.
                if not running.unfinished:
                    self._running.pop(update.request_id, None)
                    self._lock.notify_all()
        try:
            running.receive(update)
        except Exception:  # a failing receiver must not affect other requests
            _LOG.exception("The receiver of request %r failed", update.request_id)

    def _finish(self, running: _Running, reason: FinishReason, error: str | None) -> None:
        """Ends the unfinished continuations of a request whose engine is gone."""
        with self._lock:
            self._release(running)
            self._running.pop(running.request.request_id, None)
            unfinished, running.unfinished = sorted(running.unfinished), set()
            self._lock.notify_all()
        times = RequestTimes(running.submitted_s, finished_s=time.monotonic())
        for index in unfinished:
            update = GenerationUpdate(request_id=running.request.request_id, index=index, finish_reason=reason)
            self._deliver(running, replace(update, error=error, times=times))

    def _reject(self, running: _Running, error: Exception) -> None:
        """Ends a request that an engine refused, which the checks in this process should have prevented."""
        self._finish(running, "error", str(error))

    def _report(self, number: int, progress: Progress) -> None:
        self._reports[number] = progress
        if self._progress is not None and self._limits is None:
            reports = self._reports.values()
            compiled, total = sum(each.compiled for each in reports), sum(each.total for each in reports)
            self._progress(f"{progress.program} of engine {number}", compiled, total)

    def _forget_prefixes(self) -> None:
        with self._lock:
            for router in self._routers:
                router.forget()
