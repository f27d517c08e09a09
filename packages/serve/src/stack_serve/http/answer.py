"""The answer to a job: whole, or as a stream of server-sent events."""

import asyncio
import logging
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from stack_serve.http.errors import INTERNAL, ApiError
from stack_serve.http.generation import Generation
from stack_serve.http.writer import Writer, error_event

__all__ = ["Answer"]

_LOG = logging.getLogger(__name__)
_JSON = ((b"content-type", b"application/json"),)
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Answer:
    """An ASGI application that answers one request.

    The status is sent with the first update, so that a job which fails before it has its own.

    Args:
      stall_timeout_s: a client that takes nothing for so long is given up.
      names: the body's names of the engine's parameters, besides those that always differ.
    """

    def __init__(
        self, writer: Writer, generation: Generation, *, stall_timeout_s: float, names: Mapping[str, str]
    ) -> None:
        self._writer = writer
        self._generation = generation
        self._stall_timeout_s = stall_timeout_s
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers.

        Raises:
          ApiError: the job failed before anything was sent.
        """
        async with self._generation as generation:
            generation.submit(self._names)
            generation.watch(receive)
            if self._writer.job.stream:
                await self._stream(send)
            else:
                await self._whole(send)

    async def _whole(self, send: Send) -> None:
        while updates := await self._generation.take():
            for prompt, update in updates:
                self._writer.add(prompt, update)
        if not self._generation.abandoned:
            body = self._writer.whole()
            length = (b"content-length", b"%d" % len(body))
            await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
            await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        started = False
        try:
            while updates := await generation.take():
                events = b"".join([writer.chunk(prompt, update) for prompt, update in updates])
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS]})
                    started = True
                if events:
                    await self._send(send, events, more=True)
            if not generation.abandoned:
                await self._send(send, writer.last_chunk(), more=False)
        except ApiError as error:
            if not started:
                raise
            await self._send(send, error_event(error), more=False)
        except TimeoutError:
            generation.abandon()
        except Exception:  # Whatever it is, it concerns this answer alone; its client is to hear of it, too.
            if not started:
                raise
            _LOG.exception("An answer failed after it had begun")
            await self._send(send, error_event(INTERNAL), more=False)

    async def _send(self, send: Send, events: bytes, *, more: bool) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await send({"type": "http.response.body", "body": events, "more_body": more})
