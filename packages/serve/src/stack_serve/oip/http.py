"""The protocol over HTTP, as an ASGI application; it routes by hand, because a request costs microseconds here."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.types import Receive, Scope, Send

from stack_core.abi.errors import UnknownName
from stack_core.runtime.http import read_body, send_response
from stack_serve.http.config import ServerConfig
from stack_serve.http.slices import maybe_in_thread
from stack_serve.inference.repository import latest
from stack_serve.inference.service import Service
from stack_serve.oip import statistics
from stack_serve.oip.bodies import HEADER, parse, write
from stack_serve.oip.errors import ProtocolError, expecting, http_headers, http_status, message_of

__all__ = ["App"]

_LOG = logging.getLogger(__name__)
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")

Headers = Sequence[tuple[bytes, bytes]]
Reply = tuple[int, bytes, Headers]
Handler = Callable[[Scope, Receive], Awaitable[Reply]]


class App:
    """Answers the paths of the protocol, of Triton's extensions to it, and `/metrics`."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self._service = service
        self._config = config
        self._fixed: Mapping[tuple[str, str], Handler] = {
            ("GET", "/v2"): _constant(statistics.server_metadata()),
            ("GET", "/v2/health/live"): _constant({"live": True}),
            ("GET", "/v2/health/ready"): self._ready,
            ("GET", "/v2/models/stats"): self._all_statistics,
            ("POST", "/v2/repository/index"): self._index,
            ("GET", "/metrics"): self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, body, headers = await self._reply(scope, receive)
        except Exception as error:  # Any error fails this request only.
            status = http_status(error)
            if status == 500:
                _LOG.exception("%s %s failed", scope["method"], ascii(scope["path"][:200]))
            more = [(name.encode(), value.encode()) for name, value in http_headers(error).items()]
            body, headers = orjson.dumps({"error": message_of(error)}), (_JSON, *more)
        self._service.metrics.responses.labels("http", str(status)).inc()
        await send_response(send, status, body, headers)

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        handler = self._handler(scope["method"], scope["path"], scope["raw_path"])
        return await handler(scope, receive)

    def _handler(self, method: str, path: str, raw_path: bytes) -> Handler:
        if handler := self._fixed.get((method, path)):
            return handler
        # Split before the decoding, because a quoted slash belongs to a name.
        match method, [unquote(part) for part in raw_path.decode("latin-1").strip("/").split("/")]:
            case "POST", ["v2", "models", model, "infer"]:
                return lambda scope, receive: self._infer(scope, receive, model, None)
            case "POST", ["v2", "models", model, "versions", number, "infer"]:
                return lambda scope, receive: self._infer(scope, receive, model, number)
            case "GET", ["v2", "models", model, *rest]:
                return lambda scope, receive: self._model(model, rest)
            case "POST", ["v2", "repository", "models", model, "load" | "unload" as what]:
                return lambda scope, receive: self._change(model, what)
        raise ProtocolError(f"There is no {method} {path[:200]}.", status=404)

    async def _infer(self, scope: Scope, receive: Receive, model: str, version: str | None) -> Reply:
        headers = dict(scope["headers"])
        number = _number(version)
        _, lane = self._service.lane(model, number)  # before much is read for nothing
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ProtocolError("Compressed bodies are not taken. Send them as they are.", status=415)
        announced = headers.get(HEADER)
        if announced is not None and not announced.isdigit():
            raise ProtocolError(f"Inference-Header-Content-Length is {announced[:100]!r}; a number was expected.")
        json_bytes = None if announced is None else int(announced)
        most = self._service.config.max_json_bytes
        # Binary tensors need no parsing, so the stricter limit applies only to the JSON part.
        body = await self._read(headers, receive, None if json_bytes is not None and json_bytes <= most else most)
        with expecting(lane.manifest):
            request = await maybe_in_thread(len(body) if json_bytes is None else json_bytes, parse, body, json_bytes)
        answered = await self._service.infer(
            model, request.inputs, version=number, signature=request.signature, timeout_s=request.timeout_s
        )
        size_bytes = sum(array.nbytes for array in answered.outputs.values())
        content, json_bytes = await maybe_in_thread(size_bytes, write, request, answered)
        if json_bytes is None:
            return 200, content, (_JSON,)
        return 200, content, (_BINARY, (HEADER, b"%d" % json_bytes))

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, max_json_bytes: int | None = None) -> bytes:
        """Reads a body.

        Args:
          max_json_bytes: size limit of a JSON body; None if the body is binary.
        """
        most, kind = self._config.max_body_bytes, "bytes"
        if max_json_bytes is not None and max_json_bytes < most:
            most, kind = max_json_bytes, "bytes of JSON (send large tensors as binary)"
        return await read_body(
            headers, receive, max_bytes=most, timeout_s=self._config.receive_timeout_s, error=_body_error, unit=kind
        )

    async def _ready(self, scope: Scope, receive: Receive) -> Reply:
        ready = self._service.state == "ready"
        return (200 if ready else 503), orjson.dumps({"ready": ready}), (_JSON,)

    async def _model(self, model: str, rest: Sequence[str]) -> Reply:
        match rest:
            case ["versions", number, *rest]:
                version = _number(number)
            case _:
                version = None
        match rest:
            case ["ready"]:
                return self._model_ready(model, version)
            case []:
                key, lane = self._service.lane(model, version)
                return _json(statistics.model_metadata(self._service, key, lane.manifest))
            case ["config"]:
                key, lane = self._service.lane(model, version)
                return _json(statistics.model_config(key, lane.manifest))
            case ["stats"]:
                return _json(statistics.model_statistics(self._service, model, version))
        raise ProtocolError(f"There is no /v2/models/{model[:100]}/{'/'.join(rest)[:100]}.", status=404)

    def _model_ready(self, model: str, version: int | None) -> Reply:
        self._service.lane(model, version)
        return _json({"name": model, "ready": latest(self._service.versions, model) is not None})

    async def _all_statistics(self, scope: Scope, receive: Receive) -> Reply:
        return _json(statistics.model_statistics(self._service))

    async def _index(self, scope: Scope, receive: Receive) -> Reply:
        body = await self._read(dict(scope["headers"]), receive, self._service.config.max_json_bytes)
        value = _object(body)
        return _json(statistics.index(self._service, ready=value.get("ready") is True))

    async def _change(self, model: str, action: str) -> Reply:
        await (self._service.load(model) if action == "load" else self._service.unload(model))
        return _json({})

    async def _metrics(self, scope: Scope, receive: Receive) -> Reply:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return 200, self._service.metrics.text(), (kind,)


def _body_error(status: int, message: str) -> ProtocolError:
    return ProtocolError(message, status=status)


def _constant(value: Mapping[str, Any]) -> Handler:
    async def reply(scope: Scope, receive: Receive) -> Reply:
        return _json(value)

    return reply


def _json(value: Any) -> Reply:
    return 200, orjson.dumps(value), (_JSON,)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"The body is not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def _number(version: str | None) -> int | None:
    if version is None:
        return None
    if not (version.isascii() and version.isdigit()):
        raise UnknownName(f"There is no version {version[:100]!r}; versions are numbers.")
    return int(version)
