"""A language model that continues many prompts at once.

The host works one step ahead: it plans and starts step k + 1 while the devices run step k, and only then reads the
tokens of k. So a sequence that ends with a token of step k has a row in step k + 1 too, whose tokens are dropped.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from stack_core.errors import ConversionError, EngineBusy, EngineStopped, GenerationError
from stack_core.generation import EngineStats, GenerationRequest, GenerationUpdate
from stack_core.protocols import GenerativeCheckpoint
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.limits import Limits
from stack_serve.llm.loop import EngineLoop
from stack_serve.llm.programs import Programs, Progress
from stack_serve.llm.work import Work

__all__ = ["LLMEngine"]

_RETRY_AFTER_S = 1.0


class LLMEngine:
    """An `Engine` of one model.

    A thread of its own, from `start` to `close`, runs the steps; what is submitted before waits. It is a context
    manager that starts and closes it.

    Attributes:
      limits: sizes of what it serves.

    Args:
      progress: receives what `warm_up` has compiled, how many programs are done, and how many there are.

    Raises:
      ConfigError: the config does not fit the model.
      HardwareError: there are fewer devices than it asks for.
    """

    def __init__(
        self, checkpoint: GenerativeCheckpoint, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> None:
        config = EngineConfig() if config is None else config
        self.limits = Limits.of(checkpoint, config)
        self._max_waiting = config.max_waiting
        self._parameters = checkpoint.parameters
        self._programs = Programs(checkpoint, config, max_tokens=self.limits.max_tokens, pages=self.limits.pages)
        self._loop = EngineLoop(checkpoint, config, self.limits, self._programs)
        self._progress = progress
        self._lock = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._work: dict[str, Work] = {}
        self._streams: dict[str, tuple[int, queue.SimpleQueue[GenerationUpdate]]] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: BaseException | None = None

    def warm_up(self) -> None:
        """Compiles every program that a step can need, so that no request waits for one."""
        self._programs.compile_all(self._progress)

    def start(self) -> None:
        """Begins to work on requests."""
        self._thread = threading.Thread(target=self._run, name="stack-engine", daemon=True)
        self._thread.start()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` for requests to end, ends the others with "abort", and stops; nothing runs after it."""
        deadline_s = time.monotonic() + drain_s
        with self._lock:
            while self._thread is not None and self._work and (left_s := deadline_s - time.monotonic()) > 0:
                self._lock.wait(left_s)
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "LLMEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request; see `Engine`.

        Raises:
          EngineStopped: the engine was closed or failed.
        """
        self.limits.check(request)
        with self._lock:
            self._check_running()
            held = self._work.get(request.request_id)
            if (held is not None and held.unfinished) or request.request_id in self._streams:
                raise GenerationError(
                    f"A request {request.request_id!r} is being worked on. Give each an id of its own.",
                    parameter="request_id",
                )
            waiting = sum(len(work.unfinished) for work in self._work.values() if work.started_s is None)
            if waiting + request.sampling.n > self._max_waiting:
                raise EngineBusy(
                    f"{waiting} continuations wait already; max_waiting={self._max_waiting}. Try again later.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if receive is None:
                updates = queue.SimpleQueue[GenerationUpdate]()
                self._streams[request.request_id] = (request.sampling.n, updates)
                receive = updates.put
            work = self._loop.work(request, receive)
            self._work[request.request_id] = work
            self._post(lambda: self._loop.begin(work))

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request; see `Engine`. To leave early is to abort it.

        Raises:
          GenerationError: no such request was submitted to be streamed.
        """
        if request_id not in self._streams:
            raise GenerationError(f"No request {request_id!r} was submitted to be streamed, or it was already.")
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
        """Ends a request before its next step; one that has ended is left alone."""
        with self._lock:
            work = self._work.get(request_id)
            if work is not None:
                self._post(lambda: self._loop.end(work, "abort"))

    def update_weights(self, params: Any) -> None:
        """Replaces the parameters between two steps; see `Engine`. Requests that run keep the keys that they have."""
        params = _fitted(params, self._parameters)
        done = threading.Event()

        def update() -> None:
            self._loop.update_weights(params)
            done.set()

        with self._lock:
            self._check_running()
            if self._thread is None:
                return update()
            self._post(update)
        while not done.wait(1.0):
            self._check_running()
        return None

    def stats(self) -> EngineStats:
        """Counts, as of the last step.

        Raises:
          EngineStopped: the engine failed.
        """
        if self._failure is not None:
            self._check_running()
        return self._loop.stats

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._lock.notify_all()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"The engine failed: {self._failure}. Start another; see its log for the cause.")
        if self._closing:
            raise EngineStopped("The engine was closed. Start another.")

    def _run(self) -> None:
        try:
            self._loop.start()
            while self._do_posted():
                self._loop.turn()
                self._forget_ended()
            for work in list(self._work.values()):
                self._loop.end(work, "abort")
        except Exception as error:
            # Whatever a device or XLA raises: clients that wait must hear of it, and no step can follow it.
            self._failure = error
            raise
        finally:
            self._closing = True
            self._loop.tell()
            for work in list(self._work.values()):
                for continuation in list(work.unfinished.values()):
                    work.end(continuation, "error", error=f"The engine failed: {self._failure}")
            self._forget_ended()

    def _do_posted(self) -> bool:
        """Waits for something to do and takes in what was posted; says whether to go on."""
        with self._lock:
            while not (self._inbox or self._loop.has_work or self._closing):
                self._lock.wait()
            inbox, self._inbox = self._inbox, list[Callable[[], None]]()
        for action in inbox:
            action()
        return not self._closing

    def _forget_ended(self) -> None:
        with self._lock:
            ended = [request_id for request_id, work in self._work.items() if not work.unfinished]
            for request_id in ended:
                del self._work[request_id]
            if ended:
                self._lock.notify_all()


def _fitted(params: Any, expected: Any) -> Any:
    """Parameters in the dtypes of those that are expected.

    Raises:
      ConversionError: names each that is missing, unknown or of another shape.
    """
    given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(expected)}
    lines = [f"  {path} is missing" for path in wanted.keys() - given.keys()]
    lines += [f"  {path} is unknown" for path in given.keys() - wanted.keys()]
    lines += [
        f"  {path} has shape {given[path].shape}; expected {leaf.shape}"
        for path, leaf in wanted.items()
        if path in given and given[path].shape != leaf.shape
    ]
    if lines:
        listing = "\n".join(sorted(lines))
        raise ConversionError(f"The new parameters are not those of the model:\n{listing}\nGive all of its own.")
    return jax.tree.map(lambda new, old: new.astype(old.dtype), params, expected)
