"""Keys that clients send as bearer tokens, or in the header `x-api-key` as Anthropic's do."""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["NO_KEY", "Keys"]

NO_KEY = "The API key is missing or wrong. Send `Authorization: Bearer KEY` with a key that the server was given."


class Keys:
    """Lets in who has a key; all keys are compared, in a time that does not tell how much of one was right.

    Args:
      open_paths: need none.
      refusal: answers who has none.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], *, open_paths: frozenset[str], refusal: ASGIApp) -> None:
        self._app = app
        # Digests have equal lengths; the comparison of keys would reveal theirs.
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Browsers send preflight requests (OPTIONS) without a key.
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths or scope["method"] == "OPTIONS"
        headers = dict(reversed(scope.get("headers", ())))
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [key] if scheme.lower() == b"bearer" else []
        keys.append(headers.get(b"x-api-key", b""))
        await (self._app if is_open or any(map(self._knows, keys)) else self._refusal)(scope, receive, send)

    def _knows(self, key: bytes) -> bool:
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
