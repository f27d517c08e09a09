"""The ASGI application: routes, and what every request passes through."""

import logging
from importlib.metadata import version
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stack_core.abi.errors import EngineStopped, GenerationError
from stack_serve.anthropic.answers import MessagesWriter, error_body
from stack_serve.anthropic.bodies import CountBody, MessagesBody
from stack_serve.anthropic.requests import FIELD_NAMES as MESSAGES_NAMES
from stack_serve.anthropic.requests import chat_body
from stack_serve.http.access import AccessLog
from stack_serve.http.keys import NO_KEY, Keys
from stack_serve.http.slices import Items, Members, batches, json_pieces, maybe_in_thread
from stack_serve.openai.adapters import AdapterLoader
from stack_serve.openai.answer import Answer, JsonAnswer
from stack_serve.openai.bodies import decode, parse, read
from stack_serve.openai.embeddings import Embeddings
from stack_serve.openai.errors import INTERNAL, ApiError, as_api_error, renamed_error
from stack_serve.openai.job import new_id
from stack_serve.openai.openapi import openapi_json
from stack_serve.openai.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadAdapterBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    TokenizeChatBody,
    UnloadAdapterBody,
)
from stack_serve.openai.scores import rerank, score
from stack_serve.openai.service import AnswerForm, Service
from stack_serve.openai.sleep import Sleeper
from stack_serve.openai.tools import requested_tools
from stack_serve.page import chat_page
from stack_serve.responses.answers import ResponseWriter
from stack_serve.responses.bodies import ResponsesBody
from stack_serve.responses.requests import FIELD_NAMES as RESPONSES_NAMES
from stack_serve.responses.requests import chat_body as responses_chat_body
from stack_serve.responses.requests import input_messages
from stack_serve.responses.store import ResponseStore

__all__ = ["make_app"]

# Load balancers and Prometheus send no key, and the chat page asks its user for one.
_OPEN = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/openapi.json"})
_NO_KEY = ApiError(401, NO_KEY, headers={"WWW-Authenticate": "Bearer"})
_LOG = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def make_app(service: Service) -> Starlette:
    """The application that serves one model."""
    handlers = _Handlers(service)
    routes = [
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/v1/completions", handlers.complete, methods=["POST"]),
        Route("/v1/responses", handlers.respond, methods=["POST"]),
        Route("/v1/responses/{name}", handlers.response, methods=["GET", "DELETE"]),
        Route("/v1/messages", handlers.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", handlers.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", handlers.embed, methods=["POST"]),
        *(Route(path, handlers.score, methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(path, handlers.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        Route("/sleep", handlers.sleep, methods=["POST"]),
        Route("/wake_up", handlers.wake_up, methods=["POST"]),
        Route("/is_sleeping", handlers.is_sleeping, methods=["GET"]),
        Route("/v1/load_lora_adapter", handlers.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", handlers.unload_adapter, methods=["POST"]),
        Route("/v1/models", handlers.models, methods=["GET"]),
        # Names of models may contain slashes.
        Route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/", chat_page, methods=["GET"]),
        Route("/health", handlers.health, methods=["GET"]),
        Route("/ready", handlers.ready, methods=["GET"]),
        Route("/metrics", handlers.metrics, methods=["GET"]),
        Route("/version", handlers.version, methods=["GET"]),
        Route("/openapi.json", handlers.openapi, methods=["GET"]),
    ]
    config = service.config
    paths = frozenset(route.path for route in routes)
    # The first is the outermost. CORS comes before the keys, because browsers send preflight requests without a key.
    middleware = [Middleware(AccessLog), Middleware(_Outermost, service=service, paths=paths)]
    if config.cors_origins:
        origins = Middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.append(origins)
    if config.api_keys:
        middleware.append(Middleware(Keys, keys=config.api_keys, open_paths=_OPEN, refusal=_refuse_key))
    failures: Any = {
        ApiError: _api_error,
        EngineStopped: _engine_error,
        GenerationError: _engine_error,
        HTTPException: _http_error,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=failures)
    # A wrong path gets an error in OpenAI's format instead of a redirect.
    app.router.redirect_slashes = False
    return app


class _Handlers:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._adapters = AdapterLoader(service)
        self._sleeper = Sleeper(service)
        self._embeddings = Embeddings(service)
        self._responses = ResponseStore(service.config.stored_responses)

    async def chat(self, request: Request) -> Answer:
        return await self._service.chat(await self._body(request, ChatBody), request.state.request_id)

    async def complete(self, request: Request) -> Answer:
        return await self._service.complete(await self._body(request, CompletionBody), request.state.request_id)

    async def respond(self, request: Request) -> Answer:
        body, store = await self._body(request, ResponsesBody), self._responses
        earlier = body.previous_response_id
        before = () if earlier is None else store.get(earlier, param="previous_response_id").messages
        messages = [*before, *input_messages(body.input)]
        form = AnswerForm("resp_", lambda job: ResponseWriter(job, body, messages, store))
        try:
            # An id of its own, because the client may choose the request's.
            return await self._service.chat(responses_chat_body(body, messages), new_id(), form)
        except ApiError as error:
            raise renamed_error(error, RESPONSES_NAMES) from None

    async def response(self, request: Request) -> Response:
        """Returns or deletes a stored response."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._responses.delete(name)
            return _json({"id": name, "object": "response", "deleted": True})
        return _json(dict(self._responses.get(name).response))

    async def messages(self, request: Request) -> Answer:
        body = await self._body(request, MessagesBody)
        form = AnswerForm("msg_", MessagesWriter)
        try:
            return await self._service.chat(chat_body(body, self._service), request.state.request_id, form)
        except ApiError as error:
            raise renamed_error(error, MESSAGES_NAMES) from None

    async def count_tokens(self, request: Request) -> Response:
        body = chat_body(await self._body(request, CountBody), self._service)
        self._service.check_model(body.model)
        prompt = await self._service.chat_prompt(body, requested_tools(body.tools, body.tool_choice))
        return _json({"input_tokens": len(prompt.tokens)})

    async def embed(self, request: Request) -> JsonAnswer:
        body = await self._body(request, EmbeddingBody)
        return await self._embeddings.create(body, request.state.request_id, request.is_disconnected)

    async def score(self, request: Request) -> JsonAnswer:
        body = await self._body(request, ScoreBody)
        return await score(self._embeddings, body, request.state.request_id, request.is_disconnected)

    async def rerank(self, request: Request) -> JsonAnswer:
        body = await self._body(request, RerankBody)
        return await rerank(self._embeddings, body, request.state.request_id, request.is_disconnected)

    async def sleep(self, request: Request) -> Response:
        await self._sleeper.sleep(request.query_params.get("level", "1"))
        return Response()

    async def wake_up(self, request: Request) -> Response:
        await self._sleeper.wake_up()
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        return _json({"is_sleeping": self._service.state == "sleeping"})

    async def load_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self._adapters.load(await self._body(request, LoadAdapterBody)))

    async def unload_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self._adapters.unload(await self._body(request, UnloadAdapterBody)))

    async def models(self, request: Request) -> Response:
        names = (*self._service.names, *self._service.adapters)
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        return _json(self._card(self._service.check_model(request.path_params["name"])))

    async def tokenize(self, request: Request) -> JsonAnswer:
        service = self._service
        content = await read(request, service.config)
        body = await maybe_in_thread(len(content), _tokenize_body, content)
        service.check_model(body.model)
        service.prompts.needed_tokenizer()
        if isinstance(body, TokenizeChatBody):
            prompt = await service.chat_prompt(body, requested_tools(body.tools, None))
        else:
            prompt = await service.prompts.of_text(body.prompt, add_special_tokens=body.add_special_tokens)
        texts, tokens = service.token_texts, prompt.tokens
        answer = Members(count=len(tokens), max_model_len=service.max_tokens, tokens=Items(batches(tokens)))
        answer["token_strs"] = None
        if body.return_token_strs and texts is not None:
            answer["token_strs"] = Items([texts.text(token) for token in batch] for batch in batches(tokens))
        return JsonAnswer(json_pieces(answer))

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        content = await read(request, service.config)
        body = await maybe_in_thread(len(content), _parsed, DetokenizeBody, content)
        service.check_model(body.model)
        tokens = service.prompts.known(body.tokens, "tokens")
        text = await maybe_in_thread(len(tokens), service.prompts.needed_tokenizer().decode, tokens)
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Reports whether the process, and its engine if there is one, respond."""
        # Raises if the engine stopped, which becomes status 503.
        self._service.stats()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Reports whether the server accepts jobs."""
        if self._service.state != "ready":
            raise self._service.unavailable()
        self._service.stats()
        return _json({"status": "ready", "model": self._service.names[0]})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return _json({"version": version("stack-serve")})

    async def openapi(self, request: Request) -> Response:
        content = openapi_json(has_keys=bool(self._service.config.api_keys))
        return Response(content, media_type="application/json")

    async def _body(self, request: Request, cls: type[B]) -> B:
        if self._service.state != "ready":
            raise self._service.unavailable()
        content = await read(request, self._service.config)
        return await maybe_in_thread(len(content), _parsed, cls, content)

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "stack",
            "root": name if name in service.adapters else service.names[0],
            "parent": service.names[0] if name in service.adapters else None,
            "max_model_len": service.max_tokens,
        }


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
        except Exception:  # A fault of the server fails this request only.
            if started:
                raise
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            await _response(INTERNAL, scope["path"])(scope, receive, counting)


def _parsed(cls: type[B], content: bytes) -> B:
    return parse(cls, decode(content))


def _tokenize_body(content: bytes) -> TokenizeBody | TokenizeChatBody:
    value = decode(content)
    return parse(TokenizeChatBody, value) if "messages" in value else parse(TokenizeBody, value)


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


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
    assert isinstance(error, EngineStopped | GenerationError)
    return _response(as_api_error(error, {}), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"There is no {what}.", 405: f"{what}: this path takes another method."}
    message = messages.get(error.status_code, str(error.detail))
    return _response(ApiError(error.status_code, message, headers=error.headers), request.url.path)
