"""An engine in its own process; `process.py` is the side of the server."""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineStopped
from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.runtime.outbox import Outbox
from stack_core.runtime.processes import joined
from stack_core.runtime.raised import Raised
from stack_core.runtime.transfer import Transfers
from stack_serve.llm.handover import ExportedPages
from stack_serve.llm.new_weights import KeysOfOldWeights

__all__ = [
    "EngineProperties",
    "Failure",
    "Handover",
    "HostedReplica",
    "OpenEngine",
    "Progress",
    "Result",
    "host_engine",
]

OpenEngine = Callable[[Callable[[str, int, int], None]], Engine]
"""Constructs the engine, given a callback for the progress of compilation."""

_LOG = logging.getLogger(__name__)
_CALLS_AT_ONCE = 32
_HOST = "127.0.0.1"
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
class Handover:
    """Pages of a prompt that an engine offers to another one (see `Transfers`).

    Attributes:
      address: address of the process that offers them.
      weights: number of the update of the weights that computed them.
      pages: number of pages.
      blocks: key, shape and dtype of each array of `ExportedPages.blocks`.
    """

    address: str
    weights: int
    pages: int
    blocks: tuple[tuple[tuple[int, tuple[int, ...], str], ...], ...]


@dataclass(frozen=True)
class EngineProperties:
    """Constant properties of an engine.

    Attributes:
      limits: limits of the engine (see `LLMEngine`).
      parameters: shapes and dtypes of its parameters.
      adapters: adapters that it was started with.
    """

    limits: Any
    parameters: Any
    adapters: tuple[str, ...]


def host_engine(
    open_engine: OpenEngine, emit: Callable[[Any], None], numerics: Mapping[str, Any], cores: Sequence[int]
) -> "HostedReplica | HostedFollower":
    """Returns the object of a process of an engine; see `HostedReplica` for the arguments."""
    kind = HostedReplica if joined().first else HostedFollower
    return kind(open_engine, emit, numerics, cores)


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
        _prepare_process(numerics, cores)
        self._engine: Engine | None = None
        self._sent: EngineStats | Failure | None = None
        self._outbox = Outbox(emit, self._changed_stats)
        engine = open_engine(lambda program, compiled, total: self._outbox.put(Progress(program, compiled, total)))
        # Every request may wait here: the server limits how many do.
        engine.expect(_MOST_WAITING)
        self._engine = engine
        self._calls = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="call")
        self._transfers = Transfers(_HOST)
        self._lock = threading.Lock()
        # Requests whose pages are being received; False for those that were aborted.
        self._receiving: dict[str, bool] = {}
        self._keys = itertools.count()
        self._placed: dict[str, Any] = {}
        self._weights = 0
        # Excludes a change of the weights while keys of the current ones are exported or registered.
        self._weights_lock = threading.Lock()

    def start(self, compile_with: str | None, *, hands_over: bool = False) -> EngineProperties:
        """Compiles programs and starts the engine.

        Args:
          compile_with: method of the engine that compiles, "prepare" or "warm_up"; None compiles on first use.
          hands_over: True if pages are exchanged with other engines.
        """
        engine: Any = self._engine
        if hands_over:
            engine.prepare_handover()
        if compile_with is not None:
            getattr(engine, compile_with)()
        engine.start()
        return EngineProperties(engine.limits, engine.parameters, engine.adapters)

    def submit(self, request: GenerationRequest, handover: Handover | None = None) -> None:
        """Queues a request, after its pages have been received if another engine offers them."""
        assert self._engine is not None
        if handover is None:
            self._engine.submit(request, self._outbox.put)
        else:
            self._receiving[request.request_id] = True
            self._calls.submit(self._submit_with_pages, request, handover)

    def prefill(self, number: int, request: GenerationRequest) -> None:
        """Computes the keys of a prompt and emits a `Handover` as the result `number`; None if it was ended before."""
        assert self._engine is not None
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

        def receive(update: GenerationUpdate) -> None:
            if update.finish_reason == "length":
                self._calls.submit(self._call, number, partial(self._offer, request))
            elif update.finish_reason is not None:
                self._outbox.put(Result(number, None))

        self._engine.submit(replace(request, sampling=sampling), receive)

    def abort(self, request_id: str) -> None:
        assert self._engine is not None
        with self._lock:
            if request_id in self._receiving:
                self._receiving[request_id] = False
        self._engine.abort(request_id)

    def call(self, number: int, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Calls a method of the engine on a thread; its result is emitted."""
        self._calls.submit(self._call, number, partial(getattr(self._engine, method), *arguments, **keywords))

    def receive_weights(self, number: int, params: Any) -> None:
        """Places parameters that `use_weights` takes into use; emits the result `number`."""
        self._calls.submit(self._call, number, partial(self._place, params))

    def use_weights(self, number: int, weights: int, version: int, kv: KeysOfOldWeights) -> None:
        """Replaces the parameters between two steps by the received ones; emits the result `number`.

        Args:
          weights: number of the update.
        """
        self._calls.submit(self._call, number, partial(self._use, weights, version, kv))

    def drop_weights(self, number: int) -> None:
        """Frees the received parameters; emits the result `number`."""
        self._calls.submit(self._call, number, self._placed.clear)

    def close(self, drain_s: float) -> None:
        engine, self._engine = self._engine, None
        assert engine is not None
        engine.close(drain_s=drain_s)
        self._calls.shutdown(wait=True, cancel_futures=True)
        self._outbox.close()  # the server gets every update before the answer to this call

    def _place(self, params: Any) -> None:
        engine: Any = self._engine
        self._placed.update(engine.place_weights(params, donate=True))

    def _use(self, weights: int, version: int, kv: KeysOfOldWeights) -> None:
        engine: Any = self._engine
        with self._weights_lock:
            engine.use_weights(dict(self._placed), version=version, kv=kv)
            self._placed.clear()
            self._weights = weights

    def _offer(self, request: GenerationRequest) -> Handover:
        engine: Any = self._engine
        # New weights between the two would give the keys another number.
        with self._weights_lock:
            weights = self._weights
            exported = engine.export_pages(request)
        blocks = []
        for arrays in exported.blocks:
            keys = [next(self._keys) for _ in arrays]
            with self._lock:
                for key, array in zip(keys, arrays, strict=True):
                    self._transfers.offer(key, array)
            blocks.append(tuple((key, each.shape, each.dtype.name) for key, each in zip(keys, arrays, strict=True)))
        return Handover(self._transfers.address, weights, exported.pages, tuple(blocks))

    def _submit_with_pages(self, request: GenerationRequest, handover: Handover) -> None:
        engine: Any = self._engine
        try:
            exported = ExportedPages(handover.pages, self._pulled(handover))
            with self._weights_lock:
                # Keys of other weights must not reach the prefix cache.
                if handover.weights == self._weights:
                    engine.import_pages(request, exported)
        except Exception as error:  # the other process may have ended; then this engine computes the prompt
            _LOG.warning("The pages of request %r were not received: %s", request.request_id, error)
        reason, message = "abort", None
        try:
            with self._lock:  # excludes `abort`
                if self._receiving.pop(request.request_id):
                    return engine.submit(request, self._outbox.put)
        except Exception as error:  # which the checks of the server should have prevented
            reason, message = "error", str(error)
        for index in range(request.sampling.n):
            end: Any = {"index": index, "finish_reason": reason, "error": message}
            self._outbox.put(GenerationUpdate(request_id=request.request_id, **end))
        return None

    def _pulled(self, handover: Handover) -> list[tuple[jax.Array, ...]]:
        with self._lock:
            pull = partial(self._transfers.pull, handover.address)
            found = [[pull(key, shape, jnp.dtype(dtype)) for key, shape, dtype in each] for each in handover.blocks]
        return jax.block_until_ready([tuple(arrays) for arrays in found])

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


class HostedFollower:
    """A later process of an engine over several hosts, which repeats the launches of the first one.

    Emits a `Failure` if it cannot, since the first process would then wait forever. Takes the arguments of
    `HostedReplica`.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        emit: Callable[[Any], None],
        numerics: Mapping[str, Any],
        cores: Sequence[int],
    ) -> None:
        _prepare_process(numerics, cores)
        self._engine: Any = open_engine(lambda program, compiled, total: None)
        self._emit = emit
        threading.Thread(target=self._follow, name="stack-follower", daemon=True).start()

    def _follow(self) -> None:
        try:
            self._engine.follow()
        except Exception as error:  # any error of a device, of XLA or of a model
            _LOG.exception("Process %d of the engine failed", joined().id)
            self._emit([Failure(f"Process {joined().id} of the engine failed: {type(error).__name__}: {error}")])


def _prepare_process(numerics: Mapping[str, Any], cores: Sequence[int]) -> None:
    """Binds this process to its cores and sets the options of JAX."""
    if cores:
        # A thread inherits the cores of its parent, and those that exist are bound one by one.
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)
    for name, value in numerics.items():
        jax.config.update(name, value)
