"""Progress of the requests that arrive on an HTTP connection."""

import httptools

__all__ = ["MAX_HEAD_BYTES", "RequestReader"]

MAX_HEAD_BYTES = 64 * 1024


class RequestReader:
    """Finds where the heads and bodies of requests begin and end, in addition to the parser of the server.

    Attributes:
      heads: number of requests that have begun.
      complete: number of requests that have arrived completely.
      in_head: True while a head is expected or incomplete; a connection begins with one.
      in_body: True from the end of a head to the end of its body.
    """

    def __init__(self) -> None:
        self.heads = self.complete = 0
        self._parsed_bytes = self._read_bytes = 0
        self.in_head, self.in_body = True, False
        self._parser = httptools.HttpRequestParser(self)
        # The server's parser accepts, and ignores, data after a request that closes the connection.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed(self, data: bytes) -> None:
        """Reads data. Ignores errors, because the parser of the server refuses the request."""
        before = self.heads
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the server ignores upgrades
        except httptools.HttpParserError:
            self.in_head = self.in_body = False
        # A long line is not parsed before its end. In the first part of a head, other data may precede it.
        if self.in_head and self.heads == before:
            self._read_bytes += len(data)

    @property
    def is_too_long(self) -> bool:
        """True if the current head, or the last one, has more than `MAX_HEAD_BYTES`."""
        return max(self._parsed_bytes, self._read_bytes) > MAX_HEAD_BYTES

    def on_message_begin(self) -> None:
        self.heads += 1
        self._parsed_bytes = self._read_bytes = 0
        self.in_head = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self.in_head, self.in_body = False, True

    def on_message_complete(self) -> None:
        self.in_body = False
        self.complete += 1

    def _count(self, size_bytes: int) -> None:
        self._parsed_bytes += size_bytes
        if self.is_too_long:
            raise ValueError("the head is too long")  # ends the parser before another head begins
