"""Translation of Anthropic's messages, tools and settings to a chat request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stack_serve.anthropic.bodies import CountBody, MessagesBody, ToolChoice
from stack_serve.openai.bodies import parse
from stack_serve.openai.errors import bad_request
from stack_serve.openai.schemas import ChatBody
from stack_serve.openai.service import Service

__all__ = ["FIELD_NAMES", "chat_body"]

FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Names of the fields by those of the chat request, for errors."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "cache_control", "strict"})
# Values without effect: arguments are streamed in any case.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "eager_input_streaming": (True, False, None),
    "defer_loading": (False,),
    "input_examples": ([],),
}


def chat_body(body: CountBody, service: Service) -> ChatBody:
    """Returns the chat request that has the same prompt and settings.

    Raises:
      ApiError: a block, tool or setting is malformed or not supported. The error names its place.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": _system(body.system) + _messages(body.messages)}
    if _continues_answer(body.messages):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    fields["reasoning_effort"] = _effort(body, service)
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        fields["stop"] = body.stop_sequences
    fields["include_reasoning"] = body.thinking is None or body.thinking.display != "omitted"
    return parse(ChatBody, {name: value for name, value in fields.items() if value is not None})


def _effort(body: CountBody, service: Service) -> str | None:
    """Returns the effort of reasoning, None for the default of the chat template."""
    effort = None if body.output_config is None else body.output_config.effort
    effort = "xhigh" if effort == "max" else effort
    if body.thinking is None:
        return effort
    if body.thinking.type == "disabled":
        # Without a variable and a parser, there is no reasoning to turn off.
        return "none" if service.sets_effort() or service.reasons else None
    if service.sets_effort():
        return effort or "medium"
    if not service.reasons:
        raise bad_request(
            "thinking: the model does not reason, as far as its chat template shows. Leave thinking out.",
            param="thinking",
        )
    return effort


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    if not isinstance(system, (str, list)):
        raise bad_request("system is neither a text nor a list of text blocks.", param="system")
    content = system if isinstance(system, str) else [_text(each, f"system.{n}") for n, each in enumerate(system)]
    return [{"role": "system", "content": content}] if content else []


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        where, role, content = f"messages.{place}", message.get("role"), message.get("content")
        if extra := message.keys() - {"role", "content"}:
            raise bad_request(f"{where}.{min(extra)[:100]}: a message has a role and a content only.", param=where)
        if role not in ("user", "assistant"):
            raise bad_request(
                f"{where}.role is {role!r:.100}; expected 'user' or 'assistant'. Instructions belong into system.",
                param=f"{where}.role",
            )
        if isinstance(content, str):
            translated.append({"role": role, "content": content})
            continue
        if not isinstance(content, list) or not content:
            raise bad_request(f"{where}.content is neither a text nor a list of blocks.", param=f"{where}.content")
        blocks = [_checked_block(block, f"{where}.content.{number}") for number, block in enumerate(content)]
        translated += _user(blocks, where) if role == "user" else [_assistant(blocks, where)]
    return translated


def _checked_block(block: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise bad_request(f"{where} is not a block; it needs a type.", param=where)
    return block


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Returns messages of tool results and of the texts between two results."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content.{number}"
        if block["type"] == "tool_result":
            messages.append(_result(block, place))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(_text(block, place))
        else:
            messages.append({"role": "user", "content": [_text(block, place)]})
    return messages


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_members(block, {"tool_use_id", "content", "is_error", "cache_control"}, where)
    if not isinstance(block.get("tool_use_id"), str):
        raise bad_request(f"{where}.tool_use_id is missing; set it to the id of the tool_use block.", param=where)
    content = block.get("content") or ""
    if not isinstance(content, (str, list)):
        raise bad_request(f"{where}.content is neither a text nor a list of text blocks.", param=where)
    parts = content if isinstance(content, str) else [_text(each, f"{where}.content") for each in content]
    # Chat templates lack a field for failures, but the model should see them.
    if block.get("is_error") and isinstance(parts, str):
        parts = f"Error: {parts}"
    elif block.get("is_error"):
        parts = [{"type": "text", "text": "Error:"}, *parts]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": parts}


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content.{number}"
        if block["type"] == "tool_use":
            calls.append(_call(block, place))
        elif block["type"] == "thinking":
            _check_members(block, {"thinking", "signature"}, place)
            if not isinstance(block.get("thinking"), str):
                raise bad_request(f"{place}.thinking is not a text.", param=place)
            thoughts.append(block["thinking"])
        else:
            texts.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": texts or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_members(block, {"id", "name", "input", "cache_control", "caller"}, where)
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
        raise bad_request(f"{where} needs an id and a name.", param=where)
    if not isinstance(block.get("input"), Mapping):
        raise bad_request(f"{where}.input is not an object.", param=f"{where}.input")
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _text(block: Any, where: str) -> dict[str, Any]:
    block = _checked_block(block, where)
    if block["type"] != "text":
        raise bad_request(
            f"{where} is of type {block['type'][:100]!r}, which is not supported here; the model reads text.",
            param=where,
        )
    _check_members(block, {"text", "cache_control", "citations"}, where)
    if not isinstance(block.get("text"), str):
        raise bad_request(f"{where}.text is not a text.", param=where)
    if block.get("citations"):
        raise bad_request(f"{where}.citations is not supported here. Leave it out.", param=where)
    return {"type": "text", "text": block["text"]}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad_request(
            f"{where}.type is {tool['type']!r:.100}; only tools with an input_schema are supported.",
            param=f"{where}.type",
        )
    for name, value in tool.items():
        if name not in _TOOL_FIELDS and not any(value is each or value == each for each in _NEUTRAL.get(name, ())):
            raise bad_request(f"{where}.{name[:100]} is not supported here. Leave it out.", param=where)
    if "input_schema" not in tool:
        raise bad_request(f"{where}.input_schema is missing; it has no default.", param=f"{where}.input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    function |= {"strict": tool["strict"]} if "strict" in tool else {}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        if choice.name is not None:
            raise bad_request('tool_choice.name belongs to the type "tool". Leave it out.', param="tool_choice")
        return _CHOICES[choice.type]
    if choice.name is None:
        raise bad_request('tool_choice.name is missing, which the type "tool" needs.', param="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _continues_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the last message is the beginning of the answer."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return False
    content = last.get("content")
    if isinstance(content, list) and any(
        isinstance(each, Mapping) and each.get("type") == "tool_use" for each in content
    ):
        raise bad_request(
            "messages ends with a tool_use block, which no tool_result answers. Add a user message with the result.",
            param="messages",
        )
    return True


def _check_members(block: Mapping[str, Any], known: set[str], where: str) -> None:
    if extra := block.keys() - known - {"type"}:
        name = min(extra)[:100]
        raise bad_request(f"{where}.{name} is not a member of a block of type {block['type']!r}.", param=where)
