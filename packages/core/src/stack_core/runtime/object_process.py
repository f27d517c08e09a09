"""A Python object in a process of its own, whose methods any thread may call."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stack_core.abi.errors import ClusterError, FormationLost, StackError
from stack_core.runtime.cluster import Cluster, RemoteMesh
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.remote import RemoteObject

__all__ = ["Arguments", "ObjectProcess"]

_TURN_S = 0.1

Arguments = Callable[[RemoteMesh], Sequence[Any]]
"""Function that returns the arguments of a call, on the thread that may use the mesh."""


@dataclass(frozen=True)
class _Call:
    method: str
    arguments: Arguments
    keywords: Mapping[str, Any]
    future: "Future[Any]" = field(default_factory=Future)


class ObjectProcess:
    """A cluster with one `RemoteObject`, owned by a thread of this process.

    Calls are executed in their order. The process ends with `close`, or with this process. If the cluster has several
    hosts, the object has a process on each; see `RemoteObject`. All end together.

    Args:
      config: the cluster.
      axes: axes of the process's mesh, see `Cluster.mesh`.
      environment: environment variables of the process, see `Cluster.mesh`.
      build: function that returns the object, see `RemoteObject`.
      arguments: returns the arguments of `build` after `emit`.
      name: name of the process for messages, such as "the engine 'static'".
      receive: called with each value that the object emits, on the owning thread; it must not block.
      on_end: called once on the owning thread when the process is gone, with the cause if it did not end by `close`.

    Attributes:
      built: completes with None when the object is built, or with the exception that prevented that.
      pids: process ids on their hosts, by rank; empty before the processes start.
    """

    def __init__(
        self,
        config: ClusterConfig,
        axes: Mapping[str, int],
        environment: Mapping[str, str],
        build: Callable[..., Any],
        arguments: Arguments,
        *,
        name: str,
        receive: Callable[[Any], None],
        on_end: Callable[[StackError | None], None],
    ) -> None:
        self._config, self._axes, self._environment = config, dict(axes), dict(environment)
        self._build, self._arguments, self._name = build, arguments, name
        self._receive, self._on_end = receive, on_end
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._waiting: set[Future[Any]] = set()
        self._end: StackError | None = None
        self._is_closing = False
        self._cluster: Cluster | None = None
        self.pids: tuple[int | None, ...] = ()
        self.built: Future[None] = Future()
        self._waiting.add(self.built)
        # A daemon: an object that nobody closes must not keep the interpreter alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id of the object that is called."""
        return self.pids[0] if self.pids else None

    def call(self, method: str, *arguments: Any, **keywords: Any) -> "Future[Any]":
        """Calls a method of the object; the future completes with its result or its exception."""
        return self.call_with(method, lambda mesh: arguments, **keywords)

    def call_with(self, method: str, arguments: Arguments, **keywords: Any) -> "Future[Any]":
        """Calls a method with arguments that need the mesh, such as arrays that it pulls."""
        call = _Call(method, arguments, keywords)
        with self._lock:
            if self._end is not None:
                call.future.set_exception(self._end)
                return call.future
            self._waiting.add(call.future)
            self._calls.append(call)
        self._wake()
        return call.future

    def close(self, *, wait: bool = True) -> None:
        """Ends the process; calls that have not completed fail."""
        self._is_closing = True
        self._wake()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        if self._cluster is not None:
            self._cluster.wake()

    def _run(self) -> None:
        cause: StackError | None = None
        try:
            with Cluster.connect(self._config) as cluster:
                self._cluster = cluster
                self._serve(cluster)
        except FormationLost as lost:
            pids = ", ".join(map(str, self.pids))
            process = f"The process of {self._name} (pid" if len(self.pids) < 2 else f"A process of {self._name} (pids"
            cause = FormationLost(f"{process} {pids}) is gone: {lost.cause}", cause=lost.cause)
        except StackError as error:
            cause = error
        except Exception as error:  # a defect of any kind must not leave callers waiting
            cause = ClusterError(f"The process of {self._name} cannot go on: {type(error).__name__}: {error}")
            cause.__cause__ = error
        end = cause or ClusterError(f"The process of {self._name} was closed.")
        with self._lock:
            self._end, waiting = end, tuple(self._waiting)
        self._on_end(cause)
        for future in waiting:
            self._settle(future, None, end)

    def _serve(self, cluster: Cluster) -> None:
        mesh = cluster.mesh(self._axes, environment=self._environment)
        self.pids = mesh.pids
        settle = partial(self._settle, self.built)
        remote = RemoteObject(mesh, self._build, *self._arguments(mesh), receive=self._receive, on_result=settle)
        del self._arguments  # they may hold arrays
        while not self._is_closing:
            cluster.poll(_TURN_S)
            mesh.check()
            while self._calls:
                self._begin(remote, mesh, self._calls.popleft())

    def _begin(self, remote: RemoteObject, mesh: RemoteMesh, call: _Call) -> None:
        settle = partial(self._settle, call.future)
        try:
            remote.call(call.method, call.arguments(mesh), call.keywords, on_result=settle)
        except ClusterError:
            raise
        except Exception as error:  # such as an argument that cannot be pickled; the process continues
            self._settle(call.future, None, error)

    def _settle(self, future: "Future[Any]", result: Any, error: Exception | None) -> None:
        self._waiting.discard(future)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
