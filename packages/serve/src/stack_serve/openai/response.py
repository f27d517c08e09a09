"""Response to a request: one body, or a stream of server-sent events."""

import logging
from collections.abc import Iterable, Iterator, Mapping

from starlette.types import Receive, Scope, Send

from stack_serve.http.slices import Turns
from stack_serve.openai.errors import INTERNAL, ApiError
from stack_serve.openai.generation import Generation
from stack_serve.openai.serializer import Serializer

__all__ = ["EVENTS", "JSON", "GenerationResponse", "LargeJsonResponse", "ResponseBody"]

_LOG = logging.getLogger(__name__)
JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
# Between parts uvicorn waits for a slow client; a single large part would be buffered at once.
_PART_BYTES = 2**18


class GenerationResponse:
    """An ASGI application that answers one request.

    The status is sent with the first update; a request that fails earlier gets the status of its error.

    Args:
      names: field names of the body by parameter of the engine, in addition to the constant ones.
    """

    def __init__(self, serializer: Serializer, generation: Generation, *, names: Mapping[str, str]) -> None:
        self._serializer = serializer
        self._generation = generation
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response.

        Raises:
          ApiError: the request failed before anything was sent.
        """
        async with self._generation as generation:
            generation.watch(receive)
            await generation.submit(self._names)
            headers = EVENTS if self._serializer.request.stream else JSON
            body = ResponseBody(send, headers)
            await (self._stream(body) if self._serializer.request.stream else self._send_full(body))

    async def _send_full(self, body: "ResponseBody") -> None:
        turns = Turns()
        while updates := await self._generation.take():
            for prompt, update in updates:
                self._serializer.add(prompt, update)
            if turns.is_over:
                await turns.rest()
        # Nobody reads the answer after the client has left.
        if not self._generation.abandoned:
            await body.add(self._serializer.full_response())
            await body.end()

    async def _stream(self, body: "ResponseBody") -> None:
        generation, serializer = self._generation, self._serializer
        try:
            while updates := await generation.take():
                for prompt, update in updates:
                    await body.add(serializer.chunk(prompt, update))
                await body.flush()
            if not generation.abandoned:
                await body.add([serializer.last_chunk()])
                await body.end()
        # Before the first byte, the error can still be the response and set its status.
        except ApiError as error:
            if not body.started:
                raise
            await body.add([serializer.error_event(error)])
            await body.end()
        except Exception:  # Any error affects this answer only, and its client must receive it.
            if not body.started:
                raise
            _LOG.exception("An answer failed after it had begun")
            await body.add([serializer.error_event(INTERNAL)])
            await body.end()


class LargeJsonResponse:
    """An ASGI application that answers with JSON that is there in pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = ResponseBody(send, JSON)
        await body.add(self._pieces)
        await body.end()


class ResponseBody:
    """Sends the pieces of a body together, large ones in parts, and lets other requests go on meanwhile.

    Attributes:
      started: the status was sent.
    """

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = list(headers)
        self._turns = Turns()
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.started = False

    async def add(self, pieces: Iterable[bytes]) -> None:
        """Adds to the body."""
        for piece in pieces:
            self._pieces.append(piece)
            self._bytes += len(piece)
            if self._bytes >= _PART_BYTES:
                await self.flush()
            if self._turns.is_over:
                await self._turns.rest()

    async def flush(self) -> None:
        """Sends the added parts, preceded by the status."""
        await self._start()
        if self._bytes:
            await self._send_body(more=True)

    async def end(self) -> None:
        """Sends the rest."""
        if not self.started and self._headers[0] == JSON[0]:
            # The length is certain only if nothing was flushed before the end.
            self._headers.append((b"content-length", b"%d" % self._bytes))
        await self._start()
        await self._send_body(more=False)

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _send_body(self, *, more: bool) -> None:
        content = b"".join(self._pieces)
        self._pieces.clear()
        self._bytes = 0
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
