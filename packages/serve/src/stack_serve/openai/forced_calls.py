"""Answers that have to call tools: `tool_choice: "required"`, or a named function.

As in vLLM, a constraint makes the answer JSON, whatever the format of the model's own calls: a function's arguments if
the function is named, otherwise an array of calls. The format needs no parser of the model's calls.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.generation import Constraint
from stack_core.text.message_parsers import MessageDelta, MessageParser
from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["ForcedCalls", "forced_calls"]


@dataclass(frozen=True)
class ForcedCalls:
    """The form of an answer that has to call tools.

    Attributes:
      constraint: language of the answer.
      function: name of the only function; None if the model chooses among the tools.
    """

    constraint: Constraint
    function: str | None

    def parser(self) -> MessageParser:
        """Returns a parser of an answer, or of its part after the reasoning."""
        return _RequiredCalls() if self.function is None else _NamedCall(self.function)


def forced_calls(tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, parallel: bool) -> ForcedCalls | None:
    """Returns the form of the answer if `tool_choice` demands a call, else None.

    Args:
      tools: the request's tools, checked.
      choice: the field `tool_choice`, checked.
      parallel: True if several calls are allowed.
    """
    if not tools or choice in (None, "none", "auto"):
        return None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
    if choice != "required":
        function = choice["function"]["name"]
        return ForcedCalls(Constraint(json_schema=json.dumps(schemas[function])), function)
    calls = [
        {
            "type": "object",
            # References in a function's schema are relative to that schema, hence an identifier of its own.
            "properties": {"name": {"const": name}, "arguments": {"$id": f"urn:function:{name}", **schema}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if parallel else {"maxItems": 1})}
    return ForcedCalls(Constraint(json_schema=json.dumps(array)), None)


class _NamedCall(MessageParser):
    """Parser of a text that is the arguments of one function."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._name: str | None = function

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns False: requests choose this format, not templates."""
        return False

    def feed(self, text: str) -> list[MessageDelta]:
        """Returns the text as arguments, with the function's name in the first delta."""
        name, self._name = self._name, None
        return [MessageDelta("call", text, 0, name)]

    def finish(self) -> list[MessageDelta]:
        """Returns nothing, because no text is held back."""
        return []


class _RequiredCalls(StreamParser):
    """Parser of a text that is an array of calls."""

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns False: requests choose this format, not templates."""
        return False

    def _parse(self) -> Reading[None]:
        if (yield from self._json_calls()):
            yield from self._end_call()
        else:
            self._reject()  # the answer ended at its token limit
        yield from self._emit_until("content", ())
