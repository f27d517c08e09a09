"""OpenAPI 3.1 description of the server's endpoints, generated from the classes of the request bodies."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from stack_core.abi.generation import SamplingParams
from stack_serve.anthropic.bodies import CountBody, MessagesBody
from stack_serve.images.schemas import ImageBody
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
from stack_serve.responses.bodies import ResponsesBody

__all__ = ["openapi_document", "openapi_json"]

_SCHEMAS = "#/components/schemas/"
_ABOUT = (
    "Endpoints with the formats of OpenAI, Anthropic and vLLM. In the body of a request, null is the same as leaving a "
    "field out."
)

# Fields of bodies that are plain numbers there: `SamplingParams` checks their limits for all endpoints.
_CHECKED_LATER = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One method of a path.

    Attributes:
      bodies: classes of the request body, of which one matches; empty for requests without a body.
      answer: media type of the answer, or None for an empty one.
      members: members that each JSON answer has.
      streams: whether the answer is a stream of events on request.
      query: schemas of the query's parameters by name.
      is_open: whether requests need no key.
    """

    path: str
    summary: str
    method: str = "post"
    bodies: tuple[type[Body], ...] = ()
    answer: str | None = "application/json"
    members: tuple[str, ...] = ()
    streams: bool = False
    query: Mapping[str, Any] | None = None
    is_open: bool = False


def _operations() -> Sequence[_Operation]:
    answer = ("id", "object", "created", "model", "choices", "usage")
    response = ("id", "object", "status", "output", "usage")
    get = functools.partial(_Operation, method="get")
    plain, embedding = "text/plain", ("object", "data", "model", "usage")
    return (
        _Operation(
            path="/v1/chat/completions", summary="Answers messages.", bodies=(ChatBody,), members=answer, streams=True
        ),
        _Operation(
            path="/v1/completions", summary="Continues prompts.", bodies=(CompletionBody,), members=answer, streams=True
        ),
        _Operation(
            path="/v1/responses",
            summary="Answers input items (OpenAI's Responses API).",
            bodies=(ResponsesBody,),
            members=response,
            streams=True,
        ),
        get(path="/v1/responses/{name}", summary="Returns a stored response.", members=response),
        _Operation(path="/v1/responses/{name}", summary="Deletes a stored response.", method="delete"),
        _Operation(
            path="/v1/messages",
            summary="Answers messages (Anthropic's Messages API).",
            bodies=(MessagesBody,),
            members=("id", "type", "role", "model", "content", "usage"),
            streams=True,
        ),
        _Operation(
            path="/v1/messages/count_tokens",
            summary="Counts the tokens of messages.",
            bodies=(CountBody,),
            members=("input_tokens",),
        ),
        _Operation(path="/v1/embeddings", summary="Embeds texts.", bodies=(EmbeddingBody,), members=embedding),
        *(
            _Operation(path=path, summary="Compares texts.", bodies=(ScoreBody,), members=embedding)
            for path in ("/v1/score", "/score")
        ),
        *(
            _Operation(path=path, summary="Ranks documents.", bodies=(RerankBody,), members=("model", "results"))
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        _Operation(
            path="/tokenize",
            summary="Encodes a text, or messages.",
            bodies=(TokenizeBody, TokenizeChatBody),
            members=("count", "max_model_len", "tokens"),
        ),
        _Operation(path="/detokenize", summary="Decodes tokens.", bodies=(DetokenizeBody,), members=("prompt",)),
        _Operation(path="/v1/load_lora_adapter", summary="Loads an adapter.", bodies=(LoadAdapterBody,), answer=plain),
        _Operation(
            path="/v1/unload_lora_adapter", summary="Unloads an adapter.", bodies=(UnloadAdapterBody,), answer=plain
        ),
        _Operation(
            path="/update_weights_from_disk",
            summary="Replaces the weights by those of a checkpoint.",
            bodies=(UpdateWeightsBody,),
            members=("success", "message"),
        ),
        get(path="/is_sleeping", summary="Reports whether the engine sleeps.", members=("is_sleeping",)),
        _Operation(
            path="/sleep",
            summary="Puts the engine to sleep.",
            answer=None,
            query={"level": {"enum": ["1", "2"], "default": "1"}},
        ),
        _Operation(path="/wake_up", summary="Wakes the engine up.", answer=None),
        *_standard_operations(),
    )


def _image_operations() -> Sequence[_Operation]:
    return (
        _Operation(
            path="/v1/images/generations",
            summary="Generates images.",
            bodies=(ImageBody,),
            members=("created", "data", "size", "seed"),
            streams=True,
        ),
        *_standard_operations(),
    )


def _standard_operations() -> Sequence[_Operation]:
    get = functools.partial(_Operation, method="get")
    return (
        get(path="/v1/models", summary="Lists the names that `model` may have.", members=("object", "data")),
        get(path="/v1/models/{name}", summary="Returns a model.", members=("id", "object")),
        get(path="/", summary="Returns a page for a person.", answer="text/html", is_open=True),
        get(path="/health", summary="Reports whether the engine responds.", answer=None, is_open=True),
        get(path="/ready", summary="Reports whether requests are accepted.", members=("status",), is_open=True),
        get(path="/metrics", summary="Returns metrics for Prometheus.", answer="text/plain", is_open=True),
        get(path="/version", summary="Returns the server's version.", members=("version",), is_open=True),
        get(path="/openapi.json", summary="Returns this document.", members=("openapi", "paths"), is_open=True),
    )


@functools.cache
def openapi_json(*, has_keys: bool, images: bool = False) -> bytes:
    """Returns `openapi_document` as JSON."""
    return orjson.dumps(openapi_document(has_keys=has_keys, images=images))


def openapi_document(*, has_keys: bool, images: bool = False) -> dict[str, Any]:
    """Describes all endpoints in OpenAPI 3.1.

    Args:
      has_keys: whether requests need a key.
      images: whether the served model generates images instead of text.
    """
    operations = _image_operations() if images else _operations()
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _operation_object(each, has_keys=has_keys)
    mode: JsonSchemaMode = "validation"
    classes = {cls: None for each in operations for cls in each.bodies}
    _, schemas = models_json_schema([(cls, mode) for cls in classes], ref_template=_SCHEMAS + "{model}")
    components: dict[str, Any] = {"schemas": {**_plain(_limited(schemas["$defs"])), "Error": _ERROR}}
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "stack serve", "description": _ABOUT, "version": version("stack-serve")},
        "paths": paths,
        "components": components,
        **({"security": [{"bearer": []}]} if has_keys else {}),
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation_object(operation: _Operation, *, has_keys: bool) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}}
    responses = {
        "200": _success(operation),
        "4XX": {"description": "The request cannot be served as it is.", **error},
        "503": {"description": "The server starts, sleeps, ends or has failed.", **error},
        "504": {"description": "The request exceeded the server's time limit.", **error},
    }
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()]
    if "{name}" in operation.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    if operation.bodies:
        schemas = [{"$ref": _SCHEMAS + cls.__name__} for cls in operation.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if has_keys and operation.is_open:
        described |= {"security": []}
    return described


def _success(operation: _Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "Done."}
    is_json = operation.answer == "application/json"
    schema = {"type": "object", "required": list(operation.members)} if is_json else {"type": "string"}
    content: dict[str, Any] = {operation.answer: {"schema": schema}}
    if operation.streams:
        content |= {"text/event-stream": {}}
    return {"description": operation.summary, "content": content}


def _limited(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of bodies with the limits of `SamplingParams`, which checks these fields of a body."""
    limits = TypeAdapter(SamplingParams).json_schema()["properties"]
    limits = {name: {"anyOf": [limits[name], {"type": "null"}]} for name in _CHECKED_LATER}
    for schema in schemas.values():
        fields = schema.get("properties", {})
        fields.update({name: limit for name, limit in limits.items() if name in fields})
    return dict(schemas)


def _plain(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Returns schemas without titles and defaults of None, and with the first paragraph of each description."""

    def cleaned(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return [cleaned(each) for each in schema] if isinstance(schema, list) else schema
        # A field may be called "title", "default" or "description", but its schema is neither a text nor None.
        kept = {
            key: each
            for key, each in schema.items()
            if not (key == "title" and isinstance(each, str)) and not (key == "default" and each is None)
        }
        if isinstance(about := kept.get("description"), str):
            kept["description"] = about.partition("\n\n")[0]
        return {key: cleaned(each) for key, each in kept.items()}

    return cleaned(schemas)
