"""Calls between DeepSeek's markers: DeepSeek V3, R1 and V3.1.

V3 and R1 write the type of the tool, the name and a JSON block: `function<sep>name`, a line end, and the arguments in a
Markdown block of JSON. V3.1 writes `name<sep>{...}`. Both are in the chat templates of deepseek-ai/DeepSeek-V3-0324 and
DeepSeek-V3.1. V3.2 has another format.
"""

from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["DeepSeekV3Parser"]


def _marker(words: str) -> str:
    """Returns a marker as DeepSeek spells it, with a full-width bar and a block in place of spaces."""
    return (
        "<\N{FULLWIDTH VERTICAL LINE}"
        + words.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        + "\N{FULLWIDTH VERTICAL LINE}>"
    )


_CALLS, _CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
_CALL, _SEPARATOR, _CALL_END = _marker("tool call begin"), _marker("tool sep"), _marker("tool call end")


class DeepSeekV3Parser(StreamParser):
    """Parser of the forms of V3 and V3.1, which differ in what follows the separator."""

    markers: ClassVar[tuple[str, ...]] = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template writes calls of earlier messages with the marker."""
        return _CALL in template

    def _parse(self) -> Reading[None]:
        while marker := (yield from self._emit_until("content", (_CALLS, _CALL))):
            if marker == _CALLS:
                yield from self._skip_space()
            if (marker == _CALL or (yield from self._take(_CALL))) and (yield from self._call()):
                yield from self._end_call("```", _CALL_END, _CALLS_END)
            else:
                self._reject()

    def _call(self) -> Reading[bool]:
        name = yield from self._take_until(_SEPARATOR)
        if name is None:
            return False
        yield from self._skip_space()
        if (yield from self._peek()) != "{":
            name = yield from self._take_name()
            yield from self._skip_space()
            yield from self._take("```json")
            yield from self._skip_space()
        if not name.strip() or (yield from self._peek()) != "{":
            return False
        self._begin_call(name.strip())
        return (yield from self._take_json(streams=True)) is not None
