"""Translation of the items, tools and settings of the Responses API to a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

from stack_serve.openai.bodies import parse
from stack_serve.openai.errors import bad_request
from stack_serve.openai.schemas import ChatBody
from stack_serve.responses.bodies import ResponsesBody

__all__ = ["FIELD_NAMES", "chat_body", "input_messages"]

Message = dict[str, Any]

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})

FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of the fields by those of the chat request, for errors."""


def chat_body(body: ResponsesBody, messages: Sequence[Message]) -> ChatBody:
    """Returns the chat request that has the same settings.

    Args:
      messages: messages of earlier responses and of the input, without the instructions.

    Raises:
      ApiError: a tool or a setting is malformed or not supported. The error names its place.
    """
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*first, *messages],
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools)],
        "tool_choice": _choice(body.tool_choice),
    }
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    return parse(ChatBody, {name: value for name, value in fields.items() if value is not None})


def input_messages(field: Any) -> list[Message]:
    """Returns the chat messages of the field `input`.

    Reasoning, text and calls of one turn become one message of the assistant.

    Raises:
      ApiError: an item is malformed or not supported. The error names its place.
    """
    if isinstance(field, str):
        return [{"role": "user", "content": field}]
    if not isinstance(field, list) or not all(isinstance(item, dict) for item in field):
        raise bad_request("input is neither a text nor a list of items.", param="input")
    messages: list[Message] = []
    for place, item in enumerate(field):
        _add(messages, item, f"input.{place}")
    # Reasoning that nothing follows belongs to no message.
    return [each for each in messages if each["role"] != "assistant" or each["content"] is not None or _calls(each)]


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        message = _message(item, where)
        if message["role"] == "assistant" and last is not None and last["content"] is None and not _calls(last):
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "reasoning":
        messages.append({"role": "assistant", "content": None, "reasoning_content": _reasoning(item, where)})
    elif kind == "function_call":
        if last is None:
            messages.append({"role": "assistant", "content": None})
            last = messages[-1]
        last["tool_calls"] = [*_calls(last), _call(item, where)]
    elif kind == "function_call_output":
        messages.append(_output(item, where))
    else:
        raise bad_request(
            f"{where}.type is {kind!r:.100}; only messages, reasoning, function calls and their outputs are supported.",
            param=f"{where}.type",
        )


def _calls(message: Message) -> list[Message]:
    return message.get("tool_calls", [])


def _message(item: Mapping[str, Any], where: str) -> Message:
    _check_members(item, {"role", "content", "id", "status", "phase"}, where)
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role is {role!r:.100}; expected one of {', '.join(_ROLES)}.", param=f"{where}.role")
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str | list[Message]:
    """Returns the texts of a content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is neither a text nor a list of parts.", param=where)
    if not content:
        return ""
    parts: list[Message] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append({"type": "text", "text": part["refusal"]})
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise bad_request(
                f"{where}.{place} is not a text part; the model reads only text.", param=f"{where}.{place}"
            )
    return parts


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    _check_members(item, {"id", "summary", "content", "encrypted_content", "status"}, where)
    if item.get("encrypted_content"):
        raise bad_request(f"{where}.encrypted_content cannot be read here. Leave it out.", param=where)
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        raise bad_request(f"{where}.content is not a list of texts.", param=where)
    return "".join(part["text"] for part in parts)


def _call(item: Mapping[str, Any], where: str) -> Message:
    _check_members(item, {"id", "call_id", "name", "arguments", "status", "caller", "namespace"}, where)
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise bad_request(f"{where}.{name} is not a text.", param=f"{where}.{name}")
    function = {"name": item["name"], "arguments": item["arguments"] or "{}"}
    return {"id": item["call_id"], "type": "function", "function": function}


def _output(item: Mapping[str, Any], where: str) -> Message:
    _check_members(item, {"id", "call_id", "output", "status"}, where)
    if not isinstance(item.get("call_id"), str):
        raise bad_request(f"{where}.call_id is not a text.", param=f"{where}.call_id")
    content = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    if tool.get("type") != "function":
        raise bad_request(
            f'{where}.type is {tool.get("type")!r:.100}; only "function" is supported.', param=f"{where}.type"
        )
    for name, value in tool.items():
        if name not in _TOOL_FIELDS and value not in (None, False):
            raise bad_request(f"{where}.{name[:100]} is not supported here. Leave it out.", param=where)
    function = {name: tool[name] for name in _TOOL_FIELDS - {"type"} if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise bad_request(
            'tool_choice is neither "none", "auto", "required" nor {"type": "function", "name": ...}.',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _format(requested: Any) -> Message:
    if requested.type != "json_schema":
        if requested.schema_ is not None:
            raise bad_request(
                f"text.format has a schema, and the type {requested.type!r}; expected 'json_schema'.",
                param="text.format",
            )
        return {"type": requested.type}
    if requested.schema_ is None:
        raise bad_request("text.format.schema is missing, which 'json_schema' needs.", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"schema": requested.schema_}}


def _check_members(item: Mapping[str, Any], known: set[str], where: str) -> None:
    extra = [name for name, value in item.items() if name not in known and name != "type" and value is not None]
    if extra:
        raise bad_request(f"{where}.{extra[0][:100]} is not supported here. Leave it out.", param=where)
