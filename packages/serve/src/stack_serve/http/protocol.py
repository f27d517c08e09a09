"""HTTP/1.1 of uvicorn, with limits that it lacks."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LimitedProtocol"]

_MOST_HEAD_BYTES = 64 * 1024
# The first write to a peer that has left only provokes its reset, so the second follows soon.
_FIRST_PROBE_S, _PROBE_S = 0.05, 1.0


class LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol with limits on the time and the size of request heads.

    If a client pipelines requests and disconnects, the request that is being answered is notified, too; uvicorn
    notifies only the last one.

    A client that closes its sending side still gets the answer; uvicorn drops it. A disconnected client looks the same
    until something is sent, so the interim status 100 (RFC 9110, 15.2), which clients ignore, is sent every second
    until the answer begins.

    The connection is closed if the client stops reading an answer.

    Attributes:
      receive_timeout_s: time limit in seconds for receiving a head.
      stall_timeout_s: seconds without progress in sending an answer before the connection is closed.
    """

    receive_timeout_s: float
    stall_timeout_s: float
    _stall: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _answered: Any = None

    def connection_made(self, transport: Any) -> None:  # uvloop defines its own transport classes
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # pyrefly: ignore[bad-override], uvicorn annotates it without a result
        """Returns whether the connection stays open for sending: while a complete request is unanswered."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        # The client can send no further request.
        self.cycle.keep_alive = False
        self._send_probe(_FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        """Called by the event loop when the client takes less than is written."""
        super().pause_writing()
        self._end_stall()
        self._watch_stall(None)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > _MOST_HEAD_BYTES:
            msg = f"The head of a request may have {_MOST_HEAD_BYTES} bytes."
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        # Data received in one read with the head was not counted: a body, or further requests.
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > _MOST_HEAD_BYTES:
            raise ValueError("the head is too long")  # the parser ends, and uvicorn refuses the request
        self._head_bytes = 0
        is_next = self.cycle is None or self.cycle.response_complete
        super().on_headers_complete()
        cycle: Any = self.cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _UnchunkedSend(cycle)
        if is_next:
            self._answered = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            # Read before the call, in which uvicorn removes the next request from this end.
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def _send_probe(self, next_s: float) -> None:
        answered = self._answered
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not answered.response_started and answered.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe = self.loop.call_later(next_s, self._send_probe, _PROBE_S)

    def _watch_stall(self, before_bytes: int | None) -> None:
        """Cuts the connection unless fewer bytes wait for the client than a time limit before."""
        waiting_bytes = self.transport.get_write_buffer_size()
        if before_bytes is not None and waiting_bytes >= before_bytes:
            # `close` would wait for the client to read the buffer.
            self.transport.abort()
            return
        self._stall = self.loop.call_later(self.stall_timeout_s, self._watch_stall, waiting_bytes)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _begin_head(self) -> None:
        self._end_head()
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.receive_timeout_s, self.transport.close)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _UnchunkedSend:
    """Sends an HTTP/1.0 client a body of unknown length without chunks; closing the connection ends it.

    uvicorn sends chunks to every client, which RFC 9112, 6.1 forbids unless the request is of HTTP/1.1.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_raw = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self._is_raw = cycle.scope["method"] != "HEAD" and not any(name == b"content-length" for name, _ in headers)
            if self._is_raw:
                cycle.chunked_encoding = False
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        elif self._is_raw and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares them, part by part
        await self._send(message)
