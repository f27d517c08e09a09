"""A server that speaks OpenAI's HTTP interface."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from stack_core.abi.errors import StackError
from stack_serve.client.connection import Connection, ConnectionLost, Receive, Response

__all__ = ["Endpoint", "ReceiveEvent", "RequestFailed"]

ReceiveEvent = Callable[[bytes, float], None]
"""Takes the data of one event of a stream, and when it arrived, in seconds of `time.perf_counter()`."""

_END = b"[DONE]"


class RequestFailed(StackError):
    """A request without a complete answer.

    `kind` is one of "connection", "timeout", "stream" for a stream that broke off, "error" for an error event in
    a stream, or a status such as "http 429".
    """

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Endpoint:
    """Client of one server; connections stay open until the end of its `async with`.

    Args:
      base_url: URL such as "http://127.0.0.1:8000/v1"; "/v1" is added if the path is empty.
      timeout_s: time limit of a request in seconds; None waits indefinitely.

    Raises:
      RequestFailed: `base_url` is not a URL.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        # `urlsplit` would read HOST:PORT as a scheme and a path.
        given = base_url if "://" in base_url else f"http://{base_url}"
        try:
            url = urlsplit(given)
            # Within the `try`: a number out of range raises only when the attribute is read.
            port = url.port
        except ValueError:
            url, port = urlsplit(""), None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise RequestFailed(
                f"{base_url!r} is not the address of a server. Write it as http://HOST:PORT/v1.", kind="connection"
            )
        self.address = f"{url.scheme}://{url.netloc}{url.path.rstrip('/') or '/v1'}"
        self._host, self._path = url.hostname, url.path.rstrip("/") or "/v1"
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._timeout_s = timeout_s
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # Without a user's name and password, which the header must not contain.
        self._headers = f"Host: {url.netloc.rpartition('@')[2]}\r\n{authorization}Accept: */*\r\n"
        self._idle: list[Connection] = []

    async def models(self) -> list[str]:
        """Names of the models that it has.

        Raises:
          RequestFailed: it cannot be reached, or does not say.
        """
        body = bytearray()
        await self._answered(self._message("GET", "/models", b""), lambda part, arrived_s: body.extend(part))
        try:
            return [model["id"] for model in orjson.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"{self.address}/models lists no models: {error!r}.", kind="error") from error

    async def stream(self, path: str, body: Mapping[str, Any], receive: ReceiveEvent) -> None:
        """Posts a request for a stream and passes each event to `receive`.

        Raises:
          RequestFailed: the answer is not a stream, or an incomplete one.
        """
        events = _Events(receive)
        message = self._message("POST", path, orjson.dumps(body))
        await self._answered(message, events.feed)
        if not events.ended:
            raise RequestFailed(f"{self.address}{path}: the stream has no end.", kind="stream")

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    async def _answered(self, message: bytes, receive: Receive) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._exchange(message, receive)
        except TimeoutError as error:
            raise RequestFailed(f"{self.address}: no answer within {self._timeout_s} s.", kind="timeout") from error
        except ConnectionLost as error:
            kind = "stream" if error.began else "connection"
            raise RequestFailed(f"{self.address}: {error}.", kind=kind) from error
        except OSError as error:
            raise RequestFailed(
                f"{self.address} cannot be reached: {error}. Is the server running there? `stack serve` starts one.",
                kind="connection",
            ) from error
        if response.status != 200:
            raise RequestFailed(
                f"{self.address} answers {response.status}: {_reason(response)}", kind=f"http {response.status}"
            )
        return response

    async def _exchange(self, message: bytes, receive: Receive) -> Response:
        """Over a kept connection, or over a new one if the server has closed it meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._sent(connection, message, receive)
            except ConnectionLost as error:
                # Only an unanswered request is sent again: the server closes idle connections at any time.
                if error.began:
                    raise
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=self._tls
        )
        return await self._sent(connection, message, receive)

    async def _sent(self, connection: Connection, message: bytes, receive: Receive) -> Response:
        response = await connection.request(message, receive)
        if connection.is_open:
            self._idle.append(connection)
        return response


class _Events:
    """Parser of server-sent events; OpenAI's interface uses only their data."""

    def __init__(self, receive: ReceiveEvent) -> None:
        self._receive = receive
        self._rest = b""
        self.ended = False

    def feed(self, part: bytes, arrived_s: float) -> None:
        # A line may be spread over several parts.
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == _END:
                self.ended = True
            else:
                self._receive(data, arrived_s)


def _reason(response: Response) -> str:
    """The message of an error in OpenAI's shape, or what there is."""
    try:
        return orjson.loads(response.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.body[:300].decode(errors="replace") or "nothing more"
