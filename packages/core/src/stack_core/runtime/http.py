"""Parts shared by HTTP servers: API keys, request bodies with limits, and short responses.

They depend only on the ASGI interface, and the check of keys not even on that.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

__all__ = ["NO_KEY", "KeyCheck", "Keys", "read_body", "send_response", "sent_keys"]

NO_KEY = "The API key is missing or wrong. Send `Authorization: Bearer KEY` with a key that the server was given."

_PART_BYTES = 2**18
Headers = Mapping[bytes, bytes]
"""Headers of a request by lower-case name."""


def sent_keys(headers: Headers) -> list[bytes]:
    """Returns the keys in a request: the bearer token, and the header `x-api-key` of Anthropic's clients."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    keys = [key] if scheme.lower() == b"bearer" else []
    return [each.strip() for each in (*keys, headers.get(b"x-api-key", b""))]


class KeyCheck:
    """Accepts headers with one of some keys. The time of a comparison does not reveal how much of a key is right."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have equal lengths; a comparison of keys would reveal theirs.
        self._digests = [_digest(key.encode()) for key in keys]

    def __call__(self, headers: Headers) -> bool:
        # A list compares all keys, so the time does not depend on which one matches.
        matches = [hmac.compare_digest(_digest(key), known) for key in sent_keys(headers) for known in self._digests]
        return any(matches)


class Keys:
    """Middleware that answers requests without a valid key.

    Args:
      open_paths: paths that need no key.
      refusal: application that answers requests without a valid key.
    """

    def __init__(self, app: Any, keys: Iterable[str], *, open_paths: frozenset[str], refusal: Any) -> None:
        self._app, self._check, self._open_paths, self._refusal = app, KeyCheck(keys), open_paths, refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Browsers send preflight requests (OPTIONS) without a key.
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths or scope["method"] == "OPTIONS"
        # The first header of a name counts.
        is_allowed = is_open or self._check(dict(reversed(scope["headers"])))
        await (self._app if is_allowed else self._refusal)(scope, receive, send)


async def read_body(
    headers: Headers,
    receive: Callable[[], Awaitable[Any]],
    *,
    max_bytes: int,
    timeout_s: float | None = None,
    error: Callable[[int, str], Exception],
    unit: str = "bytes",
) -> bytes:
    """Reads the body of a request.

    Args:
      timeout_s: time limit for receiving the body.
      error: makes the exception for a status and a message: 413, it is too large; 408, it did not arrive in time; 400,
        the client left.
      unit: describes what `max_bytes` counts.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise error(413, f"The body has {int(announced)} bytes; the server takes {max_bytes} {unit}.")
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise error(400, "The connection was closed before the body had arrived.")
                parts.append(message.get("body", b""))
                size_bytes += len(parts[-1])
                if size_bytes > max_bytes:
                    raise error(413, f"The body has more bytes than the server takes: {max_bytes} {unit}.")
                if not message.get("more_body", False):
                    # Most bodies arrive in one part, which needs no copy.
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise error(408, f"The body did not arrive within {timeout_s:g} s. Send it again.") from None


async def send_response(
    send: Callable[[Any], Awaitable[None]],
    status: int,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
) -> None:
    """Sends a response in parts, because a server would buffer a large body for a slow client."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for start in range(0, len(body) or 1, _PART_BYTES):
        end = start + _PART_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
