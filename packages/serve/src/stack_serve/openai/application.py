"""The parts that applications with OpenAI's interface share: state, standard routes, errors and middleware."""

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Generic, Literal, Protocol, TypeVar

import orjson
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError
from stack_core.runtime.http import NO_KEY
from stack_serve.anthropic.answers import error_body
from stack_serve.http.access import AccessLog
from stack_serve.http.config import ServerConfig
from stack_serve.http.guards import guards
from stack_serve.http.slices import maybe_in_thread
from stack_serve.openai.bodies import decode, parse, read
from stack_serve.openai.errors import INTERNAL, ApiError, as_api_error
from stack_serve.openai.schemas import Body

__all__ = ["ModelService", "ServerMetrics", "json_response", "make_application", "parsed", "read_body"]

# Load balancers and Prometheus send no key, and a page asks its user for one.
_OPEN = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/openapi.json"})
_NO_KEY = ApiError(401, NO_KEY, headers={"WWW-Authenticate": "Bearer"})
_LOG = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Config = TypeVar("Config", bound=ServerConfig)


class ServerMetrics(Protocol):
    """Metrics of a server.

    Attributes:
      responses: counts responses by path, method and status.
    """

    responses: Counter

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        ...


Metrics = TypeVar("Metrics", bound=ServerMetrics)


class ModelService(Generic[Config, Metrics]):
    """A served model; used on one event loop.

    Attributes:
      state: "starting" until the engine is ready; "sleeping" and "draining" reject new requests.
      progress: human-readable progress of the startup.
      names: names of the model for clients.
      created: time in seconds since 1970.
    """

    metrics: Metrics

    def __init__(self, names: Sequence[str], config: Config) -> None:
        self.state: Literal["starting", "ready", "sleeping", "draining"] = "starting"
        self.progress = "loading the model"
        self.names, self.config = tuple(names), config
        self.created = int(time.time())

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of adapters, which clients use as model names."""
        return ()

    def stats(self) -> Any:
        """Returns the engine's counts, or None before it is ready; raises EngineStopped if it has failed."""
        raise NotImplementedError

    def openapi(self) -> bytes:
        """Returns the description of the endpoints."""
        raise NotImplementedError

    def check_model(self, name: str | None) -> str:
        """Returns the model name for the answer.

        Raises:
          ApiError: the requested model is not served.
        """
        if name is not None and name not in self.names and name not in self.adapters:
            known = ", ".join(map(repr, (*self.names, *self.adapters)))
            message = f"The model {name[:200]!r} does not exist. This server has: {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    def check_ready(self) -> None:
        """Raises an ApiError with the reason if requests are rejected now."""
        if self.state == "draining":
            raise ApiError(503, "The server is shutting down. Use another one.", code="draining")
        if self.state == "sleeping":
            raise ApiError(503, "The engine sleeps. POST /wake_up wakes it up.", code="sleeping")
        if self.state == "starting":
            message = f"The server is still starting: {self.progress}. /ready answers 200 when it has."
            raise ApiError(503, message, code="starting", headers={"Retry-After": "5"})

    def check_engines(self) -> None:
        """Raises an ApiError if none of the engines behind the server runs at the moment."""

    def model_card(self, name: str) -> dict[str, Any]:
        """Returns OpenAI's description of a model."""
        return {"id": name, "object": "model", "created": self.created, "owned_by": "stack"}


class _Standard:
    """Routes of every server: its models, health and metrics."""

    def __init__(self, service: ModelService[Any, Any]) -> None:
        self._service = service
        self.routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            # Names of models may contain slashes.
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]

    async def _models(self, request: Request) -> Response:
        service = self._service
        cards = [service.model_card(name) for name in (*service.names, *service.adapters)]
        return json_response({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        return json_response(self._service.model_card(self._service.check_model(request.path_params["name"])))

    async def _health(self, request: Request) -> Response:
        """Reports whether the process, and its engine if there is one, respond."""
        # Raises if the engine stopped, which becomes status 503.
        self._service.stats()
        return Response()

    async def _ready(self, request: Request) -> Response:
        """Reports whether the server accepts requests."""
        self._service.check_ready()
        self._service.stats()
        self._service.check_engines()
        return json_response({"status": "ready", "model": self._service.names[0]})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, request: Request) -> Response:
        return json_response({"version": version("stack-serve")})

    async def _openapi(self, request: Request) -> Response:
        return Response(self._service.openapi(), media_type="application/json")


def make_application(service: ModelService[Any, Any], routes: Sequence[Route]) -> Starlette:
    """Returns the application with the routes of a service and the standard ones."""
    routes = [*routes, *_Standard(service).routes]
    config, paths = service.config, frozenset(route.path for route in routes)
    middleware = [
        Middleware(AccessLog),
        Middleware(_Outermost, responses=service.metrics.responses, paths=paths),
        *guards(config, open_paths=_OPEN, refusal=_refuse_key),
    ]
    failures: Any = {
        ApiError: _api_error,
        EngineBusy: _engine_error,
        EngineStopped: _engine_error,
        GenerationError: _engine_error,
        HTTPException: _http_error,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=failures)
    # A wrong path gets an error in OpenAI's format instead of a redirect.
    app.router.redirect_slashes = False
    return app


async def read_body(request: Request, service: ModelService[Any, Any], cls: type[B]) -> B:
    """Reads the body of a request.

    Raises:
      ApiError: the service takes no requests, or the body is invalid.
    """
    service.check_ready()
    content = await read(request, service.config)
    return await maybe_in_thread(len(content), parsed, cls, content)


def parsed(cls: type[B], content: bytes) -> B:
    """Parses a body; raises an ApiError if it is invalid."""
    return parse(cls, decode(content))


def json_response(value: Any) -> Response:
    """Returns a small value as JSON."""
    return Response(orjson.dumps(value), media_type="application/json")


class _Outermost:
    """Counts responses by path and status, and answers where something failed that nobody foresaw."""

    def __init__(self, app: ASGIApp, responses: Counter, paths: frozenset[str]) -> None:
        self._app = app
        self._responses = responses
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
        except Exception:  # A fault of the server fails this request only.
            if started:
                raise
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            await _response(INTERNAL, scope["path"])(scope, receive, counting)


def _response(error: ApiError, path: str) -> Response:
    """Returns an error in the format of the interface to which a path belongs."""
    is_message = path.startswith("/v1/messages")
    content = error_body(error) if is_message else error.body()
    return Response(content, error.status, error.headers, media_type="application/json")


async def _refuse_key(scope: Scope, receive: Receive, send: Send) -> None:
    await _response(_NO_KEY, scope["path"])(scope, receive, send)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error, request.url.path)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineBusy | EngineStopped | GenerationError)
    return _response(as_api_error(error, {}), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"There is no {what}.", 405: f"{what}: this path takes another method."}
    message = messages.get(error.status_code, str(error.detail))
    return _response(ApiError(error.status_code, message, headers=error.headers), request.url.path)
