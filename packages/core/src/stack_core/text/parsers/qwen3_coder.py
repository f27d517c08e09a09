"""Calls as XML, one element a parameter: Qwen3-Coder, Qwen3.5, Nemotron 3.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

The format is in the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. Values are text; the function's schema decides
which of them are numbers, objects and so on. The models sometimes omit the first tag, which is allowed here as in vLLM.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from stack_core.text.parsers.base import Reading, StreamParser, read_json

__all__ = ["Qwen3CoderParser"]

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END)
_PYTHON_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_TYPES: Mapping[str, Any] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}


class Qwen3CoderParser(StreamParser):
    """Parser of XML calls, whose parameters become a JSON object. Texts are streamed, other values come at once."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template shows a call with parameters as elements."""
        return "<tool_call>" in template and _FUNCTION in template and _PARAMETER in template

    def _parse(self) -> Reading[None]:
        while marker := (yield from self._emit_until("content", ("<tool_call>", _FUNCTION))):
            if marker != _FUNCTION:
                yield from self._skip_space()
            if (marker == _FUNCTION or (yield from self._take(_FUNCTION))) and (yield from self._function()):
                yield from self._end_call("</tool_call>")
            else:
                self._reject()

    def _function(self) -> Reading[bool]:
        name = yield from self._take_name()
        if not name or not (yield from self._take(">")):
            return False
        parameters = self._parameters(name)

        def take_key() -> Reading[tuple[str, frozenset[str]] | None]:
            key = (yield from self._take_until(">")) if (yield from self._take(_PARAMETER)) else None
            return None if key is None else (key, _types(parameters.get(key)))

        return (yield from self._element_call(name, _FUNCTION_END, take_key, self._value))

    def _parameters(self, name: str) -> Mapping[str, Any]:
        for tool in self._tools:
            if tool["function"]["name"] == name:
                return (tool["function"].get("parameters") or {}).get("properties") or {}
        return {}

    def _value(self, types: frozenset[str]) -> Reading[bool]:
        """Reads a value and its closing tag; one line end after the opening and before the closing tag is layout."""
        yield from self._take("\n")
        self._drop()
        if types <= {"string"}:
            self._emit_arguments('"')
            if (yield from self._copy_until(self._emit_escaped, _VALUE_ENDS)) is None:
                return False
            self._emit_arguments('"')
        else:
            text = yield from self._take_until(_PARAMETER_END, max_characters=None)
            if text is None:
                return False
            self._emit_arguments(_as_json(text.removesuffix("\n"), types))
        self._drop()
        return True


def _types(schema: Any) -> frozenset[str]:
    """Returns the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    own = schema.get("type", ())
    nested = (_types(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or ())
    return frozenset((own,) if isinstance(own, str) else own).union(*nested)


def _as_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of a value that has one of the types; otherwise the value is a string."""
    literal = _PYTHON_LITERALS.get(text.strip().lower(), text)
    try:
        value = read_json(literal)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    allowed = [_TYPES[each] for each in types - {"string"} if each in _TYPES]
    is_allowed = any(isinstance(value, each) and (type(value) is not bool or each is bool) for each in allowed)
    return literal.strip() if is_allowed else json.dumps(text, ensure_ascii=False)
