"""The ASGI application: routes, and what every request passes through."""

import hashlib
import hmac
import logging
from importlib.metadata import version
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stack_core.errors import EngineStopped
from stack_serve.http.answer import Answer
from stack_serve.http.bodies import decode, parse, read
from stack_serve.http.errors import INTERNAL, ApiError, as_api_error
from stack_serve.http.logprobs import token_text
from stack_serve.http.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from stack_serve.http.service import Service

__all__ = ["make_app"]

_OPEN = frozenset({"/health", "/ready", "/metrics", "/version"})
_LOG = logging.getLogger(__name__)


def make_app(service: Service) -> Starlette:
    """The application that serves one model."""
    handlers = _Handlers(service)
    routes = [
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/v1/completions", handlers.complete, methods=["POST"]),
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/health", handlers.health, methods=["GET"]),
        Route("/ready", handlers.ready, methods=["GET"]),
        Route("/metrics", handlers.metrics, methods=["GET"]),
        Route("/version", handlers.version, methods=["GET"]),
    ]
    config = service.config
    paths = frozenset(route.path for route in routes)
    middleware = [Middleware(_Outermost, service=service, paths=paths)]
    if config.cors_origins:
        origins = Middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.append(origins)
    if config.api_keys:
        middleware.append(Middleware(_Keys, keys=config.api_keys))
    failures: Any = {ApiError: _api_error, EngineStopped: _engine_stopped, HTTPException: _http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=failures)
    app.router.redirect_slashes = False
    return app


class _Handlers:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Answer:
        return await self._service.chat(parse(ChatBody, await self._body(request)))

    async def complete(self, request: Request) -> Answer:
        return await self._service.complete(parse(CompletionBody, await self._body(request)))

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        return _json(self._card(self._service.check_model(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        service, value = self._service, decode(await read(request, self._service.config))
        body = parse(TokenizeChatBody if "messages" in value else TokenizeBody, value)
        service.check_model(body.model)
        tokenizer = service.prompts.needed_tokenizer()
        if isinstance(body, TokenizeChatBody):
            prompt = await service.chat_prompt(body)
        else:
            prompt = await service.prompts.of_text(body.prompt, add_special_tokens=body.add_special_tokens)
        strings = [token_text(tokenizer, token) for token in prompt.tokens] if body.return_token_strs else None
        tokens = prompt.tokens
        return _json(
            {"count": len(tokens), "max_model_len": service.max_tokens, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        body = parse(DetokenizeBody, decode(await read(request, service.config)))
        service.check_model(body.model)
        tokenizer = service.prompts.needed_tokenizer()
        return _json({"prompt": tokenizer.decode(service.prompts.known(body.tokens, "tokens"))})

    async def health(self, request: Request) -> Response:
        """Whether the process answers; its engine, too, once there is one."""
        self._service.stats()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether jobs are taken."""
        if self._service.state != "ready":
            raise self._service.unavailable()
        self._service.stats()
        return _json({"status": "ready", "model": self._service.names[0]})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return _json({"version": version("stack-serve")})

    async def _body(self, request: Request) -> dict[str, Any]:
        if self._service.state != "ready":
            raise self._service.unavailable()
        return decode(await read(request, self._service.config))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "stack",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.max_tokens,
        }


class _Keys:
    """Lets in who has a key; all keys are compared, in a time that does not tell how much of one was right."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in _OPEN or scope["method"] == "OPTIONS"
        if is_open or self._knows(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "The API key is missing or wrong. Send `Authorization: Bearer KEY` with a key that the server was given.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await _response(error)(scope, receive, send)

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class _Outermost:
    """Counts responses by path and status, and answers where something failed that nobody foresaw."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app = app
        self._responses = service.metrics.responses
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def counting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = scope["path"] if scope["path"] in self._paths else "other"  # the labels of a metric are few
                self._responses.labels(path, scope["method"], str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:  # One request met a fault of the server's; the others go on.
            if started:
                raise
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            await _response(INTERNAL)(scope, receive, counting)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _engine_stopped(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineStopped)
    return _response(as_api_error(error, {}))


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"There is no {what}.", 405: f"{what}: this path takes another method."}
    message = messages.get(error.status_code, str(error.detail))
    return _response(ApiError(error.status_code, message, headers=error.headers))
