"""Calls between DeepSeek's markers: DeepSeek V3, R1, V3.1 and V3.2.

V3 and R1 write the type of the tool, the name and a JSON block: `function<sep>name`, a line end, and the arguments in a
Markdown block of JSON. V3.1 writes `name<sep>{...}`. Both are in the chat templates of deepseek-ai/DeepSeek-V3-0324 and
DeepSeek-V3.1. V3.2 writes elements, of which a parameter marks whether its value is plain text or JSON:

    <|DSML|function_calls>
    <|DSML|invoke name="weather">
    <|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>

with full-width bars. The format is in the folder `encoding` of deepseek-ai/DeepSeek-V3.2, which has no chat template.
"""

import json
from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser, read_json

__all__ = ["DeepSeekV3Parser", "DeepSeekV32Parser"]


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


def _element(tag: str, *, closes: bool = False) -> str:
    """Returns the beginning of an element of V3.2, or its closing tag."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"</{bar}DSML{bar}{tag}>" if closes else f"<{bar}DSML{bar}{tag}"


_BLOCK, _BLOCK_END = _element("function_calls") + ">", _element("function_calls", closes=True)
_INVOKE, _INVOKE_END = _element("invoke") + ' name="', _element("invoke", closes=True)
_PARAMETER, _PARAMETER_END = _element("parameter") + ' name="', _element("parameter", closes=True)


class DeepSeekV32Parser(StreamParser):
    """Parser of the elements of V3.2. Texts are streamed, other values come at once."""

    markers: ClassVar[tuple[str, ...]] = (_BLOCK, _BLOCK_END)

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template writes calls of earlier messages as elements."""
        return _element("invoke") in template

    def _parse(self) -> Reading[None]:
        while marker := (yield from self._emit_until("content", (_BLOCK, _INVOKE))):
            if marker == _BLOCK:
                yield from self._skip_space()
            if (marker == _INVOKE or (yield from self._take(_INVOKE))) and (yield from self._call()):
                yield from self._end_call(_BLOCK_END)
            else:
                self._reject()

    def _call(self) -> Reading[bool]:
        """Reads a call after the beginning of its element."""
        name = yield from self._take_until('">')
        if not name:
            return False
        return (yield from self._element_call(name, _INVOKE_END, self._key, self._value))

    def _key(self) -> Reading[tuple[str, bool] | None]:
        """Reads the opening tag of a parameter; returns its key, and whether its value is plain text."""
        key = (yield from self._take_until('" string="')) if (yield from self._take(_PARAMETER)) else None
        if key is None:
            return None
        is_text = yield from self._take('true">')
        return (key, is_text) if is_text or (yield from self._take('false">')) else None

    def _value(self, is_text: bool) -> Reading[bool]:
        """Reads a value and its closing tag; a value that is not JSON is a text."""
        if is_text:
            self._emit_arguments('"')
            if (yield from self._copy_until(self._emit_escaped, (_PARAMETER_END,))) is None:
                return False
            self._emit_arguments('"')
        else:
            text = yield from self._take_until(_PARAMETER_END, max_characters=None)
            if text is None:
                return False
            self._emit_arguments(_json_or_text(text))
        self._drop()
        return True


def _json_or_text(text: str) -> str:
    try:
        read_json(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
