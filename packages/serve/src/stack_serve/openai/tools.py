"""Checks of tools, of the choice among them, and of their calls and results in earlier messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stack_serve.openai.errors import ApiError, bad_request
from stack_serve.openai.schemas import FUNCTION_NAME

__all__ = ["check_results", "requested_tools"]

_NAME = re.compile(FUNCTION_NAME)
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def requested_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[dict[str, Any]] | None:
    """Returns the tools that the model may call, or None.

    Args:
      choice: the field `tool_choice`; None is "auto" if there are tools.

    Raises:
      ApiError: a tool is not a function with a JSON schema, or the choice is malformed or names no tool.
    """
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools.{place}")
    names = [tool["function"]["name"] for tool in tools]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"tools has {repeated!r} twice; each function needs its own name.", param="tools")
    _check_choice(choice, names)
    return None if choice == "none" or not tools else [dict(tool) for tool in tools]


def _check_choice(choice: Any, names: Sequence[str]) -> None:
    """Rejects choices that are malformed, or name no tool."""
    if choice is None or choice in ("none", "auto"):
        return
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(name, str):
        raise bad_request(
            'tool_choice is neither "none", "auto", "required" nor {"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    if name is not None and name not in names:
        raise bad_request(f"tool_choice names {name[:100]!r}, which is not among the tools.", param="tool_choice")
    if not names:
        raise bad_request('tool_choice is "required", but there are no tools. Give tools.', param="tool_choice")


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Checks that each message with the role "tool" names an earlier call.

    Raises:
      ApiError: `tool_call_id` is missing, or no earlier call has this id.
    """
    known = set[str]()
    for place, message in enumerate(messages):
        if message.get("role") == "assistant" and isinstance(calls := message.get("tool_calls"), list):
            known |= {str(call.get("id")) for call in calls if isinstance(call, Mapping)}
        if message.get("role") != "tool":
            continue
        where, name = f"messages.{place}.tool_call_id", message.get("tool_call_id")
        if not isinstance(name, str) or not name:
            raise bad_request(f"{where} is missing; set it to the id of the call that was answered.", param=where)
        if name not in known:
            raise bad_request(
                f"{where} is {name[:100]!r}, which no tool call of an earlier assistant message has as its id.",
                param=where,
            )


def _check_tool(tool: Mapping[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise bad_request(
            f'{where}.type is {tool.get("type")!r:.100}; only "function" is known.', param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"{where}.function is missing; expected name, description and parameters.", param=where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name is {name!r:.100}; expected up to 128 letters, digits and _ . -",
            param=f"{where}.function.name",
        )
    if description is not None and not isinstance(description, str):
        raise bad_request(f"{where}.function.description is not a text.", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        return
    where = f"{where}.function.parameters"
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise bad_request(
            f'{where} is no JSON schema of an object; expected {{"type": "object", "properties": {{...}}}}.',
            param=where,
        )
    _check_schema(parameters, where)


def _check_schema(schema: Any, where: str) -> None:
    """Checks the forms of the keywords that contain schemas, types or names (JSON Schema 2020-12)."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _no_schema(where, "expected an object")
    _check_keywords(schema, where)
    for key in _MAPS:
        _check_kind(schema, key, Mapping, "an object of schemas", where)
        for name, each in schema.get(key, {}).items():
            _check_schema(each, f"{where}.{key}.{name[:100]}")
    for key in _LISTS:
        _check_kind(schema, key, list, "a list of schemas", where)
        for place, each in enumerate(schema.get(key, [])):
            _check_schema(each, f"{where}.{key}.{place}")
    for key in _SCHEMAS:
        if key in schema:
            _check_schema(schema[key], f"{where}.{key}")


def _check_keywords(schema: Mapping[str, Any], where: str) -> None:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not _are_texts(types) or not _TYPES.issuperset(types):
        raise _no_schema(f"{where}.type", f"{schema['type']!r:.100} is none of {', '.join(sorted(_TYPES))}")
    if not _are_texts(schema.get("required", [])):
        raise _no_schema(f"{where}.required", "expected a list of names")
    _check_kind(schema, "enum", list, "a list of values", where)


def _check_kind(schema: Mapping[str, Any], key: str, kind: type, expected: str, where: str) -> None:
    if key in schema and not isinstance(schema[key], kind):
        raise _no_schema(f"{where}.{key}", f"expected {expected}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _no_schema(where: str, reason: str) -> ApiError:
    return bad_request(f"{where} is no JSON schema: {reason}.", param=where)
