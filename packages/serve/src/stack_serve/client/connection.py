"""One HTTP/1.1 connection that hands parts of a response on as they arrive.

A load generator shares the machine with the server, and a token in a stream is one part: general clients spend tens of
microseconds on each, in tasks that wake each other; here a part is a callback from the event loop.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

__all__ = ["Connection", "ConnectionLost", "Receive", "Response"]

Receive = Callable[[bytes, float], None]
"""Takes a part of a response's body, and when it arrived, in seconds of `time.perf_counter()`."""


class ConnectionLost(Exception):
    """The peer closed the connection or sent invalid HTTP; `began` is True if a response had begun."""

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


@dataclass
class Response:
    """A response; of status 200 the body was handed on, of others it is in `body`."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class Connection(asyncio.Protocol):
    """A connection for one request at a time; made by the event loop's `create_connection`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._receive: Receive = _ignore
        self._arrived_s = 0.0
        self._start(None)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, message: bytes, receive: Receive) -> Response:
        """Sends a request and waits for the complete response.

        Raises:
          ConnectionLost: the response is missing or incomplete.
        """
        done = asyncio.get_running_loop().create_future()
        self._start(done)
        self._receive = receive
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the connection was closed", began=False)
        self._transport.write(message)
        try:
            await done
        except asyncio.CancelledError:
            self.close()  # the rest of this response would be parsed as the next one
            raise
        if not self._keep_alive:
            self.close()
        return self._response

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # an exception of `receive`
            self._end(error.__context__ or error)
            self.close()
        except httptools.HttpParserError as error:
            self._lost(f"the answer is no HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        # After an error the body may be incomplete.
        if self._until_closed and exc is None:
            self.on_message_complete()
        self._lost(f"the connection was closed before the end of the answer{f': {exc}' if exc else ''}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        # Without either, the end of the connection ends the body (RFC 9112, 6.3).
        self._until_closed = not {"content-length", "transfer-encoding"} & self._response.headers.keys()

    def on_body(self, body: bytes) -> None:
        if self._response.status == 200:
            self._receive(body, self._arrived_s)
        else:
            self._response.body += body

    def on_message_complete(self) -> None:
        self._until_closed = False
        self._end(None)

    def _start(self, completion: asyncio.Future[None] | None) -> None:
        self._completion = completion
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._keep_alive = self._until_closed = False

    def _lost(self, message: str) -> None:
        self._end(ConnectionLost(message, began=self._response.status != 0))

    def _end(self, error: BaseException | None) -> None:
        if self._completion is None or self._completion.done():
            return
        if error is None:
            self._completion.set_result(None)
        else:
            self._completion.set_exception(error)


def _ignore(part: bytes, arrived_s: float) -> None:
    pass
