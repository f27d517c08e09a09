"""Incremental validation of one JSON value (RFC 8259) that other text follows."""

import re
from typing import Literal

__all__ = ["JsonScanner"]

_MAX_NESTED = 64
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Finds the end of a JSON value, character by character.

    Invariant: the characters accepted so far begin some JSON value, up to the spelling of a number or literal, which
    is checked at its end.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expects: Literal["value", "first item", "first key", "key", "colon", "comma"] = "value"
        self._string: Literal["no", "text", "escape"] = "no"
        self._is_key = False
        self._hex_digits = 0
        self._scalar = ""

    def push(self, character: str) -> Literal["open", "complete", "complete before", "invalid"]:
        """Adds a character.

        Returns:
          "open" if the value needs more; "complete" if it ends with the character; "complete before" if it ended
          before the character, as a number may; "invalid" if no value continues so. A character counts as added unless
          the value was complete before it or is invalid.
        """
        if self._string != "no":
            return self._push_to_string(character)
        if self._scalar:
            if character in _SCALAR_CHARACTERS:
                self._scalar += character
                return "open"
            if not self.end_scalar():
                return "invalid"
            if not self._open:
                return "complete before"
        return "open" if character in " \t\n\r" else self._push_token(character)

    def end_scalar(self) -> bool:
        """Ends a number or literal and returns whether it is valid; returns False without a number or literal."""
        is_valid = _SCALAR.fullmatch(self._scalar) is not None
        self._scalar = ""
        self._expects = "comma"
        return is_valid

    def _push_token(self, character: str) -> Literal["open", "complete", "invalid"]:
        expects = self._expects
        if self._open and character == _CLOSERS[self._open[-1]]:
            if expects not in ("comma", "first item" if character == "]" else "first key"):
                return "invalid"
            self._open.pop()
            return self._end_value()
        if character == "," and expects == "comma" and self._open:
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == '"' and expects not in ("colon", "comma"):
            self._string, self._is_key = "text", expects in ("key", "first key")
        elif expects not in ("value", "first item"):
            return "invalid"
        elif character in _CLOSERS and len(self._open) < _MAX_NESTED:
            self._open.append(character)
            self._expects = "first key" if character == "{" else "first item"
        elif character in _SCALAR_CHARACTERS:
            self._scalar = character
        else:
            return "invalid"
        return "open"

    def _push_to_string(self, character: str) -> Literal["open", "complete", "invalid"]:
        if self._hex_digits:
            self._hex_digits -= 1
            return "open" if character in "0123456789abcdefABCDEF" else "invalid"
        if self._string == "escape":
            self._string = "text"
            self._hex_digits = 4 if character == "u" else 0
            return "open" if character in '"\\/bfnrtu' else "invalid"
        if character == "\\":
            self._string = "escape"
        elif character == '"':
            self._string = "no"
            if not self._is_key:
                return self._end_value()
            self._expects, self._is_key = "colon", False
        elif character < " ":
            return "invalid"
        return "open"

    def _end_value(self) -> Literal["open", "complete"]:
        self._expects = "comma"
        return "open" if self._open else "complete"
