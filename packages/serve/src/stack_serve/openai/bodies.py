"""Bodies of requests, from bytes to checked values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import pydantic
from starlette.requests import Request

from stack_core.abi.errors import nearest
from stack_core.runtime.http import read_body
from stack_serve.http.config import ServerConfig
from stack_serve.openai.errors import ApiError, bad_request
from stack_serve.openai.schemas import Body

__all__ = ["decode", "explain", "parse", "read"]

B = TypeVar("B", bound=Body)

_MOST_NESTED = 64
_LARGEST_FLOAT = 2.0**53  # from here on, neighbouring integers are the same float


@dataclass(frozen=True)
class _Foreign:
    """A field of OpenAI's or vLLM's interface that is not served.

    Attributes:
      neutral: values without an effect, which are accepted.
      instead: advice in the error message.
    """

    instead: str
    neutral: tuple[Any, ...] = ()


_TOOLS = "Use tools of /v1/chat/completions"
_TEXT_ONLY = "The model reads and writes text: leave it out"
_SPACES = "skip_special_tokens alone says whether special tokens are part of the text"
_LEAVE = "Leave it out"

_CHOICES = {"functions": "function_call"}
"""Fields that take no effect if the second field is "none"."""

_FOREIGN: Mapping[str, _Foreign] = {
    "audio": _Foreign(_TEXT_ONLY),
    "background": _Foreign("Responses: use stream; images are opaque", (False, "auto", "opaque")),
    "cache_salt": _Foreign("Start the server without prefix caching to keep prompts apart"),
    "chat_template": _Foreign("Start the server with --chat-template FILE"),
    "context_management": _Foreign("Shorten the input", ([],)),
    "conversation": _Foreign("Use previous_response_id of /v1/responses"),
    "documents": _Foreign("Put them into a message", ([],)),
    "echo": _Foreign("Only /v1/completions has it", (False,)),
    "function_call": _Foreign(_TOOLS, ("none", "auto")),
    "functions": _Foreign(_TOOLS, ([],)),
    "guided_decoding_backend": _Foreign("llguidance compiles all constraints", ("auto", "guidance", "llguidance")),
    "include_reasoning": _Foreign("The text contains the reasoning; /v1/chat/completions separates it", (True,)),
    "kv_transfer_params": _Foreign(_LEAVE),
    "length_penalty": _Foreign("It belongs to beam search, which is not served", (1, 1.0)),
    "logits_processors": _Foreign("Start the server with --logits-processors, and select them by vllm_xargs", ([],)),
    "max_tool_calls": _Foreign("The client runs the tools, and can stop"),
    "modalities": _Foreign(_TEXT_ONLY, (["text"],)),
    "moderation": _Foreign("Images are not moderated", ("auto", "low")),
    "parallel_tool_calls": _Foreign(_TOOLS, (True, False)),
    "prediction": _Foreign(_LEAVE),
    "prompt_embeds": _Foreign("Send the prompt as text or token ids"),
    "prompt_cache_retention": _Foreign(_LEAVE, ("in_memory",)),
    "quality": _Foreign("Use steps and size", ("auto",)),
    "reasoning_effort": _Foreign("Use /v1/chat/completions, whose prompts have a chat template"),
    "service_tier": _Foreign("Use priority", ("auto", "default")),
    "spaces_between_special_tokens": _Foreign(_SPACES, (True, False)),
    "store": _Foreign("Nothing is stored: keep the answers yourself", (False,)),
    "style": _Foreign("Describe it in the prompt"),
    "suffix": _Foreign("Put the text that follows into the prompt, as the model was trained to have it", ("",)),
    "tool_choice": _Foreign(_TOOLS, ("none", "auto")),
    "tools": _Foreign(_TOOLS, ([],)),
    "truncate_prompt_tokens": _Foreign("Shorten the messages; /v1/messages/count_tokens counts their tokens"),
    "use_beam_search": _Foreign("Use n continuations and choose", (False,)),
    "verbosity": _Foreign("Ask for it in a message", ("medium",)),
    "vllm_xargs": _Foreign("Use /v1/chat/completions or /v1/completions", ({},)),
    "web_search_options": _Foreign(_TOOLS),
}


async def read(request: Request, config: ServerConfig) -> bytes:
    """Returns the body as it arrived.

    Raises:
      ApiError: 415, it is not JSON; 413, it is too large; 408, it did not arrive in time; 400, only a part arrived.
    """
    _check_type(request)
    headers, receive = dict(request.scope["headers"]), request.receive
    limits = {"max_bytes": config.max_body_bytes, "timeout_s": config.receive_timeout_s}
    return await read_body(headers, receive, **limits, error=_body_error)


def _body_error(status: int, message: str) -> ApiError:
    # The rest of the body may still arrive, so the connection cannot serve another request.
    return ApiError(status, message, headers={"Connection": "close"} if status in (408, 413) else None)


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, without fields that are null, and with 3 for 3.0.

    Raises:
      ApiError: it is none, or is nested too deeply.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"The body is {_kind(value)}; a JSON object was expected.")
    # Counting brackets is cheap and bounds the depth, so most bodies are never walked.
    if body.count(b"[") + body.count(b"{") > _MOST_NESTED and _nested_too_deeply(value):
        raise bad_request(f"The body is nested deeper than {_MOST_NESTED} levels; send a flatter one.")
    # OpenAI's clients send null for fields that were not set.
    return {name: _as_integer(field) for name, field in value.items() if field is not None}


def parse(cls: type[B], value: Mapping[str, Any]) -> B:
    """Checks a decoded body.

    Raises:
      ApiError: a field is unknown, not supported, missing or invalid; names it.
    """
    unused = {name for name, choice in _CHOICES.items() if value.get(choice) == "none"}
    fields = {
        name: field
        for name, field in value.items()
        if name in cls.model_fields or (name not in unused and _means_something(name, field))
    }
    unknown = next((name for name in fields if name not in cls.model_fields), None)
    if unknown is not None:
        raise bad_request(_unknown(unknown, cls), param=unknown[:100], code="unknown_parameter")
    try:
        return cls.model_validate(fields)
    except pydantic.ValidationError as error:
        raise explain(error) from None


def explain(error: pydantic.ValidationError, names: Mapping[str, str] | None = None) -> ApiError:
    """Describes the first error; quotes the given value if it is short.

    Args:
      names: names of the body's fields, if they differ.
    """
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in problem["loc"]]
    place[:1] = [(names or {}).get(name, name) for name in place[:1]]
    # Pydantic adds the branch of a union to the path of an error, which clients do not know.
    where = ".".join(part for part in place if part.isidentifier() or part.isdigit())[:100]
    if problem["type"] == "missing":
        return bad_request(f"{where} is missing; it has no default.", param=where)
    given = problem.get("input")
    shown = f" (given {given!r})" if isinstance(given, bool | int | float | str) and len(repr(given)) < 100 else ""
    return bad_request(f"{where}: {problem['msg']}{shown}.", param=where)


def _as_integer(value: Any) -> Any:
    """Converts 3.0 to 3, which are equal in JSON Schema: models of bodies refuse a float for an integer."""
    is_whole = type(value) is float and value.is_integer() and abs(value) <= _LARGEST_FLOAT
    return int(value) if is_whole else value


def _means_something(name: str, field: Any) -> bool:
    """Returns whether an unsupported field has an effect; bools are not numbers here, unlike in Python."""
    foreign = _FOREIGN.get(name)
    return foreign is None or not any(field == each and type(field) is type(each) for each in foreign.neutral)


def _unknown(name: str, cls: type[Body]) -> str:
    if name in _FOREIGN:
        return f"{name} is not supported here. {_FOREIGN[name].instead}."
    shown = name if len(name) <= 100 else f"{name[:100]}..."
    return f"Unrecognized request argument: {shown!r}.{nearest(name[:100], cls.model_fields)} Leave it out."


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The body's Content-Type is {kind!r}; send JSON as 'application/json'.")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"The body's Content-Encoding is {encoding!r}; send it uncompressed.")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _nested_too_deeply(value: Any) -> bool:
    """Returns whether containers are nested beyond the limit."""
    # Level by level, because recursion would fail on the values that this function must find.
    level = [value]
    for _ in range(_MOST_NESTED):
        inner = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in inner if isinstance(child, (dict, list))]
        if not level:
            return False
    return True
