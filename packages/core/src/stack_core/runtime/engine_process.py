"""The driver's side of a generation engine in another process, with separate devices."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, NamedSharding

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ClusterError, ConversionError, EngineStopped, GenerationError, StackError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import EngineStats, FinishReason, GenerationRequest, GenerationUpdate, RequestTimes
from stack_core.abi.mesh import MeshConfig
from stack_core.runtime.cluster import RemoteMesh
from stack_core.runtime.config import EngineProcessConfig
from stack_core.runtime.hosted_engine import NUMERICS, HostedEngine
from stack_core.runtime.object_process import ObjectProcess
from stack_core.runtime.raised import Raised
from stack_core.runtime.tree_paths import path_name

__all__ = ["EngineProcess"]

_LOG = logging.getLogger(__name__)
_CLOSE_S = 10.0  # for the engine to finish its step and to end its requests

_Receive = Callable[[GenerationUpdate], None]


@dataclass
class _Progress:
    """A request in progress.

    Attributes:
      is_accepted: True once the worker's engine has queued the request.
      is_requested: True once the worker was asked for the updates.
      receive: callback for updates, or None for `stream`.
      unfinished: indices of the unfinished continuations.
      updates: updates or exceptions that `stream` has not yielded yet.
    """

    request: GenerationRequest
    receive: _Receive | None
    unfinished: set[int]
    submitted_s: float
    updates: "queue.SimpleQueue[GenerationUpdate | Exception]" = field(default_factory=queue.SimpleQueue)
    is_accepted: bool = False
    is_requested: bool = False
    is_streamed: bool = False


class EngineProcess(Engine):
    """Runs an engine in another process, with the same results as in this process.

    The process is the worker of a cluster of one host. It constructs the engine from the checkpoint without its
    parameters. The initial parameters and every update reach it by the runtime's transfer, where the process pulls the
    parts that its mesh needs. Requests and updates travel in the command stream of the mesh. Calls are executed in
    their order, so a request submitted after `update_weights` has returned is sampled with the new weights.

    If the worker dies or a signal stops it, every request in progress finishes with "error", and later calls raise an
    `EngineStopped` that names the worker, its end and its last output. It is not restarted. The worker ends with this
    process, however this one ends.

    Args:
      checkpoint: model that generates. When pickled, it must leave its parameters behind.
      open_engine: function that constructs the engine in the worker; it is pickled.
      config: settings of the worker process.
      name: name of the engine for messages.
      mesh: mesh for the parameters over the worker's devices, split as `checkpoint.shardings` says; None is the
        worker's first device.

    Raises:
      ClusterError: the worker cannot start, or ends meanwhile.
      StackError: the engine cannot be constructed.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        open_engine: Callable[[GenerativeCheckpoint], Engine],
        config: EngineProcessConfig | None = None,
        *,
        name: str,
        mesh: MeshConfig | None = None,
    ) -> None:
        config = EngineProcessConfig() if config is None else config
        leaves = jax.tree.leaves_with_path(checkpoint.parameters)
        self._shapes = {path_name(path): leaf.shape for path, leaf in leaves}
        self._checkpoint, self._is_sharded = checkpoint, mesh is not None
        self._specs: dict[str, tuple[Any, ...]] | None = None
        self._lock = threading.Lock()
        self._requests: dict[str, _Progress] = {}
        self._stop: str | None = None
        self._callbacks: queue.SimpleQueue[tuple[_Receive, GenerationUpdate] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run_callbacks, name="engine-callbacks", daemon=True).start()
        params = checkpoint.load_params()
        numerics = {option: jax.config.values[option] for option in NUMERICS}
        self._process = ObjectProcess(
            config.cluster,
            {"data": 1} if mesh is None else mesh.sizes,
            config.environment,
            partial(HostedEngine, open_engine, checkpoint),
            lambda mesh: (self._pull(mesh, params), numerics),
            name=f"the engine {name!r}",
            receive=self._receive,
            on_end=self._end,
        )
        try:
            self._process.built.result()
            self.keeps_missing, self.reports_experts, self._adapters = self._process.call("describe").result()
        except BaseException as error:  # including Ctrl-C, which need not wait for a process that is starting
            self._process.close(wait=isinstance(error, Exception))
            raise

    @property
    def pid(self) -> int | None:
        """The process id of the worker on its host."""
        return self._process.pid

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._adapters

    def expect(self, continuations: int) -> None:
        self._call("expect", continuations)

    def warm_up(self) -> None:
        self._call("warm_up")

    def start(self) -> None:
        self._call("start")

    def close(self, *, drain_s: float = 0.0) -> None:
        """Closes the engine and ends its process. An engine that does not close in time is killed."""
        with self._lock:
            was_stopped, self._stop = self._stop is not None, self._stop or "The engine was closed. Start another."
        if not was_stopped:
            with contextlib.suppress(StackError, TimeoutError):
                self._process.call("close", drain_s=drain_s).result(drain_s + _CLOSE_S)
        self._process.close()

    def submit(self, request: GenerationRequest, receive: _Receive | None = None) -> None:
        """Queues a request and waits for its acceptance; see `Engine`."""
        name = request.request_id
        with self._lock:
            self._check_running()
            if name in self._requests:
                raise GenerationError(
                    f"Request {name!r} is still in progress. Give each request a unique id.", parameter="request_id"
                )
            progress = _Progress(request, receive, set(range(request.sampling.n)), time.monotonic())
            self._requests[name] = progress
        try:
            self._call("submit", request, receives=receive is not None)
        except BaseException:  # including Ctrl-C: a request that was not accepted must not reserve its id
            self._requests.pop(name, None)
            raise
        progress.is_accepted = True

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request; see `Engine`. Closing the iterator early aborts the request.

        Raises:
          GenerationError: no request of this id was submitted without `receive`, or it was streamed already.
        """
        progress = self._requests.get(request_id)
        if progress is None or progress.receive is not None or progress.is_streamed:
            raise GenerationError(f"There is no request {request_id!r} to stream.", parameter="request_id")
        progress.is_streamed = True
        with self._lock:
            # One command for all requests that will be streamed: a round trip for each would take longer than a token.
            waiting = {name: each for name, each in self._requests.items() if each.receive is None}
            new = [name for name, each in waiting.items() if each.is_accepted and not each.is_requested]
            for name in new:
                waiting[name].is_requested = True
        if new:
            self._process.call("stream", new)
        unfinished = progress.request.sampling.n
        try:
            while unfinished:
                update = progress.updates.get()
                if isinstance(update, Exception):
                    raise update
                unfinished -= update.finish_reason is not None
                yield update
        finally:
            self._requests.pop(request_id, None)
            if unfinished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        self._process.call("abort", request_id)

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: Literal["keep", "recompute", "abort"] = "keep",
        donate: bool = False,
    ) -> None:
        """Sends the parameters to the worker and waits for the swap; see `Engine`.

        Meanwhile the engine continues with earlier requests, and new requests wait.
        """
        self._check_params(params)
        with self._lock:
            self._check_running()
        pulled = lambda mesh: (self._pull(mesh, params),)
        self._result(self._process.call_with("update_weights", pulled, version=version, kv=kv))
        if donate:
            for leaf in jax.tree.leaves(params):
                if isinstance(leaf, jax.Array):
                    leaf.delete()

    def stats(self) -> EngineStats:
        """Returns the worker's counts and rates.

        Raises:
          EngineStopped: the engine was closed, or its process is gone.
        """
        return self._call("stats")

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        if self._stop is not None:
            self._check_running()
        return self._result(self._process.call(method, *arguments, **keywords))

    def _result(self, future: "Future[Any]") -> Any:
        try:
            return future.result()
        except ClusterError as error:  # from the runtime, since an engine raises none
            raise EngineStopped(str(error)) from error

    def _check_running(self) -> None:
        if self._stop is not None:
            raise EngineStopped(self._stop)

    def _check_params(self, params: Any) -> None:
        """Checks the structure and shapes on which the transfer relies.

        Raises:
          ConversionError: they differ from the checkpoint's parameters, or arrays were deleted; names each parameter.
        """
        given = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
        lines = [f"{name} is unknown" for name in given.keys() - self._shapes.keys()]
        if lines or not given or not self.keeps_missing:
            lines += [f"{name} is missing" for name in self._shapes.keys() - given.keys()]
        for name in given.keys() & self._shapes.keys():
            shape = getattr(given[name], "shape", None)
            if shape != self._shapes[name]:
                lines.append(f"{name} has shape {shape}; expected {self._shapes[name]}")
            elif isinstance(given[name], jax.Array) and given[name].is_deleted():
                lines.append(f"{name} was deleted, or donated to a program; expected a live array")
        if lines:
            raise ConversionError("The new weights do not fit this model:\n  " + "\n  ".join(sorted(lines)))

    def _run_callbacks(self) -> None:
        """Runs the callbacks of requests, which may call this engine, on a thread other than the process's owner."""
        while (item := self._callbacks.get()) is not None:
            receive, update = item
            try:
                receive(update)
            except Exception:  # a callback may raise anything; later callbacks must run
                _LOG.exception("The receiver of request %r raised.", update.request_id)

    # The methods below run on the thread that owns the process.

    def _pull(self, mesh: RemoteMesh, params: Any) -> Any:
        if self._specs is None:
            self._specs = self._found_specs(mesh) if self._is_sharded else {}
        specs = self._specs
        return mesh.pull(params, jax.tree.map_with_path(lambda path, _: specs.get(path_name(path), ()), params))

    def _found_specs(self, mesh: RemoteMesh) -> dict[str, tuple[Any, ...]]:
        shardings = self._checkpoint.shardings(AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes)))
        leaves = jax.tree.leaves_with_path(shardings, is_leaf=lambda node: isinstance(node, NamedSharding))
        return {path_name(path): tuple(sharding.spec) for path, sharding in leaves}

    def _receive(self, updates: Sequence[tuple[str, GenerationUpdate | Raised]]) -> None:
        for name, update in updates:
            self._take(name, update)

    def _take(self, name: str, update: GenerationUpdate | Raised) -> None:
        progress = self._requests.get(name)
        if progress is None:  # refused, or its iterator was closed
            return
        if isinstance(update, Raised):
            progress.updates.put(update.exception())
            return
        if update.times is not None:
            update = replace(update, times=_on_this_clock(update.times, progress.submitted_s))
        self._deliver(progress, update)

    def _deliver(self, progress: _Progress, update: GenerationUpdate) -> None:
        if update.finish_reason is not None:
            progress.unfinished.discard(update.index)
        if progress.receive is None:
            progress.updates.put(update)
            return
        self._callbacks.put((progress.receive, update))
        if not progress.unfinished:
            self._requests.pop(update.request_id, None)

    def _end(self, cause: StackError | None) -> None:
        """Finishes all requests once the process is gone."""
        with self._lock:
            if cause is not None:
                self._stop = f"{cause} Start another engine."
            left = tuple(self._requests.values())
        reason: FinishReason = "abort" if cause is None else "error"
        for progress in left:
            for index in sorted(progress.unfinished):
                times = RequestTimes(progress.submitted_s, finished_s=time.monotonic())
                ended = {"finish_reason": reason, "error": None if cause is None else str(cause), "times": times}
                self._deliver(progress, GenerationUpdate(request_id=progress.request.request_id, index=index, **ended))
        self._callbacks.put(None)


def _on_this_clock(times: RequestTimes, submitted_s: float) -> RequestTimes:
    """Converts timestamps of the worker's monotonic clock to this machine's clock."""
    shift_s = submitted_s - times.submitted_s
    moved = (times.started_s, times.first_token_s, times.finished_s)
    return RequestTimes(submitted_s, *(None if each is None else each + shift_s for each in moved))
