"""Generation for one request, from its submission to the engine to its last update."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate
from stack_serve.http.slices import Turns
from stack_serve.openai.errors import ApiError, as_api_error
from stack_serve.openai.metrics import Metrics
from stack_serve.openai.request import ApiRequest, failure_of, new_id
from stack_serve.openai.sampling import PARAMETER_NAMES
from stack_serve.openai.traces import GenerationSpans
from stack_serve.openai.updates import UpdateDispatcher, UpdateQueue

__all__ = ["Backend", "Generation"]


@dataclass(frozen=True)
class Backend:
    """State shared by the requests of a server.

    Attributes:
      running: generations in the engine.
      timeout_s: time limit of a request in seconds; None sets no limit.
      tracer: OpenTelemetry tracer; None records no spans.
    """

    engine: Engine
    dispatcher: UpdateDispatcher
    metrics: Metrics
    timeout_s: float | None
    tracer: Any = None
    running: set["Generation"] = field(default_factory=set)


class Generation:
    """The continuations of a request; leaving its block removes them from the engine.

    Attributes:
      abandoned: True if no client waits for the answer.
    """

    def __init__(self, request: ApiRequest, backend: Backend) -> None:
        self._request = request
        self._backend = backend
        self._updates = UpdateQueue()
        self._open: dict[tuple[int, int], str] = {}
        self._progress = backend.metrics.progress(request)
        self._spans = None if backend.tracer is None else GenerationSpans(backend.tracer, request)
        self._watcher: asyncio.Task[None] | None = None
        self._failure: ApiError | None = None

    @property
    def abandoned(self) -> bool:
        return self._updates.closed

    async def __aenter__(self) -> "Generation":
        self._backend.running.add(self)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._backend.running.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        self._abort()

    async def submit(self, names: Mapping[str, str]) -> None:
        """Submits all prompts to the engine; if it rejects one, leaving the block aborts the accepted ones.

        Args:
          names: field names of the body by parameter of the engine, in addition to the constant ones.

        Raises:
          ApiError: the engine rejects a prompt, or is full.
        """
        request, backend, turns = self._request, self._backend, Turns()
        try:
            for number, prompt in enumerate(request.prompts):
                submitted = GenerationRequest(
                    request_id=new_id(),
                    prompt=prompt.tokens,
                    sampling=request.sampling,
                    priority=request.priority,
                    timeout_s=backend.timeout_s,
                    adapter=request.adapter,
                    images=prompt.images,
                )
                backend.engine.submit(submitted, backend.dispatcher.receiver(self._updates, number))
                self._open |= {(number, index): submitted.request_id for index in range(request.sampling.n)}
                if turns.is_over:
                    await turns.rest()
                # The client may have left while other tasks ran.
                if self.abandoned:
                    return
        except (GenerationError, EngineBusy, EngineStopped) as error:
            raise as_api_error(error, {**PARAMETER_NAMES, **names}) from None

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Ends the generation when the client's connection ends."""
        # The attribute keeps the task alive: the event loop has only weak references to tasks.
        self._watcher = asyncio.create_task(self._until_disconnect(receive))

    async def take(self) -> list[tuple[int, GenerationUpdate]]:
        """Returns the next updates with their prompt indices; empty once all continuations are finished or abandoned.

        Raises:
          ApiError: a continuation failed, and all earlier updates were returned.
        """
        if self._failure is not None:
            raise self._failure
        if not self._open or self.abandoned:
            return []
        arrived = await self._updates.take()
        if self.abandoned:
            return []
        if self._request.nothing_new:
            arrived = [(prompt, _without_tokens(update)) for prompt, update in arrived]
        for place, (prompt, update) in enumerate(arrived):
            self._progress.note(prompt, update)
            if self._spans is not None:
                self._spans.note(prompt, update)
            if update.finish_reason is not None:
                self._open.pop((prompt, update.index), None)
                self._failure = failure_of(update, self._backend.timeout_s)
                if self._failure is not None:
                    if place == 0:
                        raise self._failure
                    return arrived[:place]
        return arrived

    def abandon(self) -> None:
        """Ends it at once."""
        self._updates.close()
        self._abort()

    def cut_short(self) -> None:
        """Aborts the continuations in the engine; the client receives an error."""
        # The continuations of a prompt share one request.
        for request_id in set(self._open.values()):
            self._backend.engine.abort(request_id)

    def _abort(self) -> None:
        self.cut_short()
        self._progress.end("abort", len(self._open))
        if self._spans is not None:
            self._spans.abort(self._open)
        self._open = {}

    async def _until_disconnect(self, receive: Callable[[], Awaitable[Any]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abandon()


def _without_tokens(update: GenerationUpdate) -> GenerationUpdate:
    """An update of a continuation that was generated only because the prompt's log-probabilities were wanted."""
    # The client requested no token, so a stop due to the extra one must not show.
    reason = "length" if update.finish_reason == "stop" else update.finish_reason
    logprobs = None if update.logprobs is None else ()
    return replace(
        update, tokens=(), weights_versions=(), text="", logprobs=logprobs, finish_reason=reason, stop_reason=None
    )
