"""HTTP/1.1 of uvicorn, with limits that it lacks."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LimitedProtocol"]

_MOST_HEAD_BYTES = 64 * 1024


class LimitedProtocol(HttpToolsProtocol):
    """A protocol whose clients must send the head of a request in time, and a short one.

    Where a client sends requests without waiting for answers and leaves, the one that is being answered hears of it,
    too; uvicorn tells the last alone.

    Attributes:
      receive_timeout_s: for a head.
    """

    receive_timeout_s: float
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _answered: Any = None

    def connection_made(self, transport: Any) -> None:  # uvloop has transports of its own
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.send_400_response(f"The head of a request may have {_MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        is_next = self.cycle is None or self.cycle.response_complete
        super().on_headers_complete()
        if is_next:
            self._answered = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.receive_timeout_s, self.transport.close)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
