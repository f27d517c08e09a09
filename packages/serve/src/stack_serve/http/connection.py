"""Limits of HTTP connections that uvicorn lacks, around any of its protocols."""

import asyncio
import contextvars
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stack_serve.http.reading import MAX_HEAD_BYTES, RequestReader
from stack_serve.http.unchunked import UnchunkedWriter

__all__ = ["AnswerTracking", "LimitedConnection"]

_HEAD_ERROR = b"The head of a request may have %d bytes." % MAX_HEAD_BYTES
_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b"
) % (len(_HEAD_ERROR), _HEAD_ERROR)
# The first write to a peer that has left only provokes its reset, so the second follows soon.
_FIRST_PROBE_S, _PROBE_S = 0.05, 1.0

# Tasks that a protocol starts while it receives data inherit the variable.
_CONNECTION: "contextvars.ContextVar[LimitedConnection]" = contextvars.ContextVar("connection")


class LimitedConnection(asyncio.Protocol):
    """Passes a connection on to a protocol of HTTP/1.1, whose application is wrapped in `AnswerTracking`.

    The connection is closed if the head of a request is too long or does not arrive in time, if the rest of a body does
    not arrive in time after the answer, and if the client stops reading an answer.

    A client that closes its sending side still gets the answers. A disconnected client looks the same until something
    is sent, so the interim status 100 (RFC 9110, 15.2), which clients ignore, is sent every second until the answer
    begins.

    Args:
      protocol: protocol of HTTP/1.1 that parses the requests and sends the answers.
      receive_timeout_s: time limit in seconds for receiving a head, or a body that has been answered.
      stall_timeout_s: seconds without progress in sending an answer before the connection is closed.
    """

    def __init__(self, protocol: asyncio.Protocol, *, receive_timeout_s: float, stall_timeout_s: float) -> None:
        self._protocol: Any = protocol
        self._receive_timeout_s, self._stall_timeout_s = receive_timeout_s, stall_timeout_s
        self._requests, self._answers = RequestReader(), 0
        self._answer: _Answer | None = None
        self._is_half_closed = False
        self._head, self._body, self._stall, self._probe = _Timer(), _Timer(), _Timer(), _Timer()
        self._context = contextvars.copy_context()
        self._context.run(_CONNECTION.set, self)

    def connection_made(self, transport: Any) -> None:  # uvloop defines its own transport classes
        self._transport, self._output = transport, _Output(transport)
        self._lost = asyncio.get_running_loop().create_future()
        self._head.start(self._receive_timeout_s, transport.close)
        self._protocol.connection_made(self._output)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._body, self._stall, self._probe):
            timer.stop()
        self._lost.set_result(None)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads = self._requests.heads
        self._requests.feed(data)
        if self._requests.is_too_long:
            # An answer in progress must not be mixed up with this one.
            if self._answers == self._requests.complete:
                self._transport.write(_REFUSAL)
            self._transport.close()
            return
        if not self._requests.in_head:
            self._head.stop()
        elif self._requests.heads != heads:
            self._head.start(self._receive_timeout_s, self._transport.close)
        self._bound_body()
        self._context.run(self._protocol.data_received, data)

    def eof_received(self) -> bool:
        """Returns whether the connection stays open for sending: while a complete request is unanswered."""
        if self._requests.in_body or self._answers == self._requests.complete:
            return False
        self._is_half_closed = True
        self._head.stop()
        self._send_probe(_FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        """Called by the event loop when the client takes less than is written."""
        self._protocol.pause_writing()
        self._watch_stall(None)

    def resume_writing(self) -> None:
        self._stall.stop()
        self._protocol.resume_writing()

    @property
    def lost(self) -> "asyncio.Future[None]":
        """Done when the connection has ended."""
        return self._lost

    @property
    def has_body(self) -> bool:
        """True if the body of the request that is answered has arrived."""
        return self._requests.complete > self._answers

    def begin_answer(self, answer: "_Answer") -> None:
        """Called before the application answers a request; it answers one at a time."""
        self._answer = answer
        if answer.http_version == "1.0":
            self._output.write = UnchunkedWriter(self._transport.write)

    def end_answer(self) -> None:
        """Called after an answer."""
        self._answers += 1
        self._answer = None
        self._bound_body()
        if self._is_half_closed and self._answers >= self._requests.complete:
            # Not yet, since the protocol may report an error of the application first.
            asyncio.get_running_loop().call_soon(self._transport.close)

    def _bound_body(self) -> None:
        """Limits the time in which the rest of an answered body must arrive."""
        if not (self._requests.in_body and self._answers > self._requests.complete):
            self._body.stop()
        elif not self._body.is_running:
            self._body.start(self._receive_timeout_s, self._transport.close)

    def _send_probe(self, next_s: float) -> None:
        answer = self._answer
        if answer is not None and not answer.is_started and answer.http_version == "1.1":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe.start(next_s, self._send_probe, _PROBE_S)

    def _watch_stall(self, before_bytes: int | None) -> None:
        """Cuts the connection unless fewer bytes wait for the client than a time limit before."""
        waiting_bytes = self._transport.get_write_buffer_size()
        if before_bytes is not None and waiting_bytes >= before_bytes:
            # `close` would wait for the client to read the buffer.
            self._transport.abort()
            return
        self._stall.start(self._stall_timeout_s, self._watch_stall, waiting_bytes)


class AnswerTracking:
    """Middleware around an application whose connections are `LimitedConnection`s.

    If a client pipelines requests and disconnects, the request that is being answered is notified, too; uvicorn
    notifies only the last one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(_CONNECTION.get(), scope, receive, send)
        try:
            await self._app(scope, answer.receive, answer.send)
        finally:
            answer.end()


class _Answer:
    """The answer to a request, which ends with its connection."""

    def __init__(self, connection: LimitedConnection, scope: Scope, receive: Receive, send: Send) -> None:
        self.http_version: str = scope["http_version"]
        self.is_started = self._is_ended = self._is_read = False
        self._connection, self._receive, self._send = connection, receive, send
        connection.begin_answer(self)

    async def receive(self) -> Message:
        lost = self._connection.lost
        if not self._is_read and self._connection.has_body:
            self._is_read = True
            return await self._receive()
        arrived = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((arrived, lost), return_when=asyncio.FIRST_COMPLETED)
            return arrived.result() if arrived.done() else {"type": "http.disconnect"}
        finally:
            arrived.cancel()

    async def send(self, message: Message) -> None:
        if self._connection.lost.done():
            return
        self.is_started = True
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.end()

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._connection.end_answer()


class _Output:
    """The transport of a connection, with an exchangeable `write`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.write: Any = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Timer:
    """A callback that is scheduled at most once."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, callback: Any, *arguments: Any) -> None:
        """Schedules the callback, and forgets an earlier one."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(delay_s, callback, *arguments)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
