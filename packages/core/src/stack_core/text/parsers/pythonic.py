"""Calls as a Python list, `[add(text="a", count=1), other()]`: Llama 4, ToolACE.

The format is in the prompts of meta-llama/Llama-4-Scout-17B-16E-Instruct and Team-ACE/ToolACE-8B. Llama 4 may enclose
the list in `<|python_start|>` and `<|python_end|>`.
"""

import ast
import json
import re
from typing import Any, ClassVar

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["PythonicParser"]

_SHOWN = re.compile(r"\[func_name1\(")
_START, _END = "<|python_start|>", "<|python_end|>"
_ESCAPE_DIGITS = {"x": 2, "u": 4, "U": 8}
_NO_LITERAL = object()
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(StreamParser):
    """Parser of calls with keyword arguments that are Python literals. Texts are streamed.

    A message that begins with "[" is a list of calls only if it names a known function.
    """

    markers: ClassVar[tuple[str, ...]] = (_START, _END)

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template shows a list of calls."""
        return _SHOWN.search(template) is not None

    def _parse(self) -> Reading[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            yield from self._list()
        else:
            self._at = 0
        while (yield from self._emit_until("content", (_START,))):
            yield from self._skip_space()
            yield from self._list()

    def _list(self) -> Reading[None]:
        separator = "["
        while (yield from self._take(separator)):
            yield from self._skip_space()
            if not (yield from self._call()):
                break
            self._drop()
            yield from self._skip_space()
            if (yield from self._take("]")):
                yield from self._end_call(_END)
                return
            separator = ","
        self._reject()

    def _call(self) -> Reading[bool]:
        name = yield from self._take_name()
        is_known = not self._tools or any(tool["function"]["name"] == name for tool in self._tools)
        if not name or not is_known or not (yield from self._take("(")):
            return False
        return (yield from self._element_call(name, ")", self._key, self._value))

    def _key(self) -> Reading[tuple[str, None] | None]:
        key = yield from self._take_name("_")
        yield from self._skip_space()
        return (key, None) if key and (yield from self._take("=")) else None

    def _value(self, _: None) -> Reading[bool]:
        """Reads a literal and the comma after it. Texts are streamed, other values come at once."""
        yield from self._skip_space()
        if (yield from self._peek()) in ("'", '"'):
            if not (yield from self._text()):
                return False
        elif not (yield from self._literal()):
            return False
        yield from self._skip_space()
        if not (yield from self._take(",")) and (yield from self._peek()) != ")":
            return False
        self._drop()
        return True

    def _text(self) -> Reading[bool]:
        quote = yield from self._peek()
        self._at += 1
        self._drop()
        self._emit_arguments('"')
        while (character := (yield from self._peek())) != quote:
            begin = self._at
            self._at += 1
            if character == "\\":
                digits = _ESCAPE_DIGITS.get((yield from self._peek()), 0)
                for _ in range(1 + digits):
                    yield from self._peek()
                    self._at += 1
            escape = f"{quote}{self._buffer[begin : self._at]}{quote}"
            text = _evaluate(escape) if character == "\\" else character
            if not character or not isinstance(text, str):
                self._at = min(self._at, len(self._buffer))
                return False
            self._drop()
            self._emit_escaped(text)
        self._at += 1
        self._drop()
        self._emit_arguments('"')
        return True

    def _literal(self) -> Reading[bool]:
        begin = self._at
        if not (yield from self._find_end()):
            return False
        try:
            text = json.dumps(_evaluate(self._buffer[begin : self._at]), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):  # no JSON: a set, bytes, an infinity
            return False
        self._emit_arguments(text)
        return True

    def _find_end(self) -> Reading[bool]:
        """Moves to the comma or parenthesis that ends a literal; returns False without one."""
        closers: list[str] = []
        quote = ""
        while character := (yield from self._peek()):
            if quote:
                if character == "\\":
                    self._at += 1
                    yield from self._peek()
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in _BRACKETS:
                closers.append(_BRACKETS[character])
            elif closers and character == closers[-1]:
                closers.pop()
            elif character in ",)" and not closers:
                return True
            self._at += 1
        self._at = len(self._buffer)
        return False


def _evaluate(text: str) -> Any:
    """Returns the value of a Python literal; of other text, an object that is no JSON."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NO_LITERAL
