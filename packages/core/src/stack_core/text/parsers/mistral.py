"""Calls after `[TOOL_CALLS]` and reasoning within `[THINK]`: Mistral, Ministral, Magistral and Devstral.

Models up to Mistral Small 3.1 write an array, `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`. Later ones write
`[TOOL_CALLS]name[ARGS]{...}` for each call; Mistral Small 3.2 has `[CALL_ID]` with an id before `[ARGS]`. Both are in
the chat templates of these models, such as mistralai/Mistral-Nemo-Instruct-2407 and Ministral-3-14B-Reasoning-2512.
"""

from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser
from stack_core.text.parsers.think import ThinkParser

__all__ = ["MistralParser", "MistralReasoningParser"]


class MistralParser(StreamParser):
    """Parser of both forms of Mistral's calls."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template writes calls of earlier messages with the marker."""
        return "[TOOL_CALLS]" in template

    def _parse(self) -> Reading[None]:
        while (yield from self._emit_until("content", ("[TOOL_CALLS]",))):
            yield from self._skip_space()
            is_array = (yield from self._peek()) == "["
            if (yield from self._json_calls() if is_array else self._named_call()):
                yield from self._end_call()
            else:
                self._reject()

    def _named_call(self) -> Reading[bool]:
        name = yield from self._take_name()
        if (yield from self._take("[CALL_ID]")):
            yield from self._take_name()
        yield from self._take("[ARGS]")
        yield from self._skip_space()
        if not name or (yield from self._peek()) != "{":
            return False
        self._begin_call(name)
        return (yield from self._take_json(streams=True)) is not None


class MistralReasoningParser(ThinkParser):
    """Parser of reasoning within `[THINK]` and `[/THINK]`."""

    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
