"""Access log: one line per request, with an id that is also returned to the client."""

import logging
import random
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOG", "AccessLog"]

LOG = logging.getLogger("stack_serve.access")
"""Logger of the access log. Silent unless it has a handler and the level INFO."""

_MOST_ID_CHARACTERS = 128
# Reading the system's random numbers would hand the interpreter to another thread in every request.
_IDS = random.Random()


class AccessLog:
    """Middleware that assigns each request an id and logs its outcome.

    The id is the client's own `X-Request-Id` if that is a short word, and random otherwise. It is returned in the
    response header `X-Request-Id` and stored in the scope's state for the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()
        request_id = _client_request_id(scope) or f"{_IDS.getrandbits(128):032x}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if LOG.isEnabledFor(logging.INFO):
                client = (scope.get("client") or ("-",))[0]
                took_s = time.monotonic() - began_s
                # The path comes from the client: escape it to prevent forged log lines.
                path = ascii(scope["path"][:200])[1:-1]
                LOG.info("%s %s %s %s %.3fs %s", client, scope["method"], path, status or "-", took_s, request_id)


def _client_request_id(scope: Scope) -> str | None:
    request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    is_word = request_id.isascii() and request_id.replace("-", "").replace("_", "").isalnum()
    return request_id if is_word and len(request_id) <= _MOST_ID_CHARACTERS else None
