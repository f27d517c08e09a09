"""The ASGI application of a language model: one handler per route."""

from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from stack_serve.anthropic.answers import MessagesSerializer
from stack_serve.anthropic.bodies import CountBody, MessagesBody
from stack_serve.anthropic.requests import FIELD_NAMES as MESSAGES_NAMES
from stack_serve.anthropic.requests import chat_body
from stack_serve.http.slices import Items, Members, batches, json_pieces, maybe_in_thread
from stack_serve.openai.adapters import AdapterLoader
from stack_serve.openai.application import json_response, make_application, parsed, read_body
from stack_serve.openai.bodies import decode, parse, read
from stack_serve.openai.embeddings import Embeddings
from stack_serve.openai.errors import ApiError, renamed_error
from stack_serve.openai.request import new_id
from stack_serve.openai.response import GenerationResponse, LargeJsonResponse
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
    UpdateWeightsBody,
)
from stack_serve.openai.scores import rerank, score
from stack_serve.openai.service import ResponseForm, Service
from stack_serve.openai.sleep import Sleeper
from stack_serve.openai.tools import requested_tools
from stack_serve.openai.weights import WeightLoader
from stack_serve.page import chat_page
from stack_serve.responses.answers import ResponseSerializer
from stack_serve.responses.bodies import ResponsesBody
from stack_serve.responses.requests import FIELD_NAMES as RESPONSES_NAMES
from stack_serve.responses.requests import chat_body as responses_chat_body
from stack_serve.responses.requests import input_messages
from stack_serve.responses.store import ResponseStore

__all__ = ["make_app"]

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
        Route("/update_weights_from_disk", handlers.update_weights, methods=["POST"]),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/", chat_page, methods=["GET"]),
    ]
    return make_application(service, routes)


class _Handlers:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._adapters = AdapterLoader(service)
        self._sleeper = Sleeper(service)
        self._weights = WeightLoader(service)
        self._embeddings = Embeddings(service)
        self._responses = ResponseStore(service.config.stored_responses)

    async def chat(self, request: Request) -> GenerationResponse:
        return await self._service.chat(await self._body(request, ChatBody), request.state.request_id)

    async def complete(self, request: Request) -> GenerationResponse:
        return await self._service.complete(await self._body(request, CompletionBody), request.state.request_id)

    async def respond(self, request: Request) -> GenerationResponse:
        body, store = await self._body(request, ResponsesBody), self._responses
        earlier = body.previous_response_id
        before = () if earlier is None else store.get(earlier, param="previous_response_id").messages
        messages = [*before, *input_messages(body.input)]
        form = ResponseForm("resp_", lambda parsed: ResponseSerializer(parsed, body, messages, store))
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
            return json_response({"id": name, "object": "response", "deleted": True})
        return json_response(dict(self._responses.get(name).response))

    async def messages(self, request: Request) -> GenerationResponse:
        body = await self._body(request, MessagesBody)
        form = ResponseForm("msg_", MessagesSerializer)
        try:
            return await self._service.chat(chat_body(body, self._service), request.state.request_id, form)
        except ApiError as error:
            raise renamed_error(error, MESSAGES_NAMES) from None

    async def count_tokens(self, request: Request) -> Response:
        body = chat_body(await self._body(request, CountBody), self._service)
        self._service.check_model(body.model)
        prompt = await self._service.chat_prompt(body, requested_tools(body.tools, body.tool_choice))
        return json_response({"input_tokens": len(prompt.tokens)})

    async def embed(self, request: Request) -> LargeJsonResponse:
        body = await self._body(request, EmbeddingBody)
        return await self._embeddings.create(body, request.state.request_id, request.is_disconnected)

    async def score(self, request: Request) -> LargeJsonResponse:
        body = await self._body(request, ScoreBody)
        return await score(self._embeddings, body, request.state.request_id, request.is_disconnected)

    async def rerank(self, request: Request) -> LargeJsonResponse:
        body = await self._body(request, RerankBody)
        return await rerank(self._embeddings, body, request.state.request_id, request.is_disconnected)

    async def sleep(self, request: Request) -> Response:
        await self._sleeper.sleep(request.query_params.get("level", "1"))
        return Response()

    async def wake_up(self, request: Request) -> Response:
        await self._sleeper.wake_up()
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self._service.state == "sleeping"})

    async def load_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self._adapters.load(await self._body(request, LoadAdapterBody)))

    async def unload_adapter(self, request: Request) -> Response:
        return PlainTextResponse(await self._adapters.unload(await self._body(request, UnloadAdapterBody)))

    async def update_weights(self, request: Request) -> Response:
        return json_response(await self._weights.load(await self._body(request, UpdateWeightsBody)))

    async def tokenize(self, request: Request) -> LargeJsonResponse:
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
        return LargeJsonResponse(json_pieces(answer))

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        content = await read(request, service.config)
        body = await maybe_in_thread(len(content), parsed, DetokenizeBody, content)
        service.check_model(body.model)
        tokens = service.prompts.known(body.tokens, "tokens")
        text = await maybe_in_thread(len(tokens), service.prompts.needed_tokenizer().decode, tokens)
        return json_response({"prompt": text})

    async def _body(self, request: Request, cls: type[B]) -> B:
        return await read_body(request, self._service, cls)


def _tokenize_body(content: bytes) -> TokenizeBody | TokenizeChatBody:
    value = decode(content)
    return parse(TokenizeChatBody, value) if "messages" in value else parse(TokenizeBody, value)
