"""Bodies of unknown length for HTTP/1.0 clients."""

from collections.abc import Callable

import httptools

__all__ = ["UnchunkedWriter"]


class UnchunkedWriter:
    """Writes one response without chunks; closing the connection ends it.

    uvicorn sends chunks to every client, which RFC 9112, 6.1 forbids unless the request is of HTTP/1.1. It closes the
    connection after the response.

    Args:
      write: function that writes to the client.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._parser = httptools.HttpResponseParser(self)
        self._reason, self._headers = b"", list[bytes]()

    def __call__(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_status(self, status: bytes) -> None:
        self._reason = status

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() != b"transfer-encoding":
            self._headers.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        status = b"HTTP/1.1 %d %b\r\n" % (self._parser.get_status_code(), self._reason)
        self._write(b"".join((status, *self._headers, b"\r\n")))
        self._headers.clear()

    def on_body(self, body: bytes) -> None:
        self._write(body)
