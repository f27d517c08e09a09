"""The base of parsers: primitives that read a growing text, for generators that read as if all of it were there."""

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from stack_core.text.message_parsers import MessageDelta, MessageParser, merge_deltas
from stack_core.text.parsers.json_scanner import JsonScanner

__all__ = ["Reading", "StreamParser", "read_json"]

T = TypeVar("T")
V = TypeVar("V")

Reading: TypeAlias = Generator[None, None, T]
"""A generator that yields whenever it needs more text."""

_ARGUMENTS = ("arguments", "parameters")
_NAME_CHARACTERS = 256  # longest name of a function that a call may have


class StreamParser(MessageParser):
    """A parser whose format is described by the generator `_parse`.

    The generator sees the text only through the methods below, which wait for more instead of returning a result that
    depends on it. The deltas are therefore the same for every split of the text.

    `_buffer[:_at]` has been read, but its meaning is not certain yet: it becomes content, arguments or nothing.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = (), prompt: str = "") -> None:
        super().__init__(tools=tools, prompt=prompt)
        self._buffer, self._at, self._has_ended = "", 0, False
        self._deltas: list[MessageDelta] = []
        self._calls = 0
        self._reading = self._parse()

    def feed(self, text: str) -> list[MessageDelta]:
        """Adds generated text and returns the deltas that became certain."""
        self._buffer += text
        next(self._reading, None)
        deltas = merge_deltas(self._deltas)
        self._deltas.clear()
        return deltas

    def finish(self) -> list[MessageDelta]:
        """Returns the remaining deltas at the end of the text."""
        self._has_ended = True
        return self.feed("")

    @abstractmethod
    def _parse(self) -> Reading[None]:
        """Reads the message to its end."""

    def _emit(self, kind: Literal["content", "reasoning"], text: str) -> None:
        self._deltas.append(MessageDelta(kind, text))

    def _emit_arguments(self, text: str) -> None:
        """Appends text to the arguments of the last call."""
        self._deltas.append(MessageDelta("call", text, self._calls - 1))

    def _begin_call(self, name: str) -> None:
        """Begins a call and omits the text read so far."""
        self._drop()
        self._deltas.append(MessageDelta("call", "", self._calls, name))
        self._calls += 1

    def _drop(self) -> str:
        """Removes and returns the text read so far."""
        text, self._buffer, self._at = self._buffer[: self._at], self._buffer[self._at :], 0
        return text

    def _reject(self) -> None:
        """Makes the text read so far content: it was no call."""
        self._emit("content", self._drop())

    def _wait(self) -> Reading[bool]:
        """Waits until a character follows the cursor; returns False at the end of the text."""
        while self._at >= len(self._buffer):
            if self._has_ended:
                return False
            yield
        return True

    def _peek(self) -> Reading[str]:
        """Returns the next character, or "" at the end."""
        return self._buffer[self._at] if (yield from self._wait()) else ""

    def _skip_space(self) -> Reading[None]:
        while (yield from self._wait()) and self._buffer[self._at].isspace():
            self._at += 1

    def _take(self, text: str) -> Reading[bool]:
        """Reads `text` if it follows the cursor."""
        begin = self._at
        for place, character in enumerate(text, start=begin):
            self._at = place
            if (yield from self._peek()) != character:
                self._at = begin
                return False
        self._at = begin + len(text)
        return True

    def _take_name(self, extra: str = "._-") -> Reading[str]:
        """Reads the letters, digits and `extra` characters that follow the cursor."""
        begin = self._at
        while (character := (yield from self._peek())) and (character.isalnum() or character in extra):
            self._at += 1
        return self._buffer[begin : self._at]

    def _take_until(self, marker: str, *, max_characters: int | None = _NAME_CHARACTERS) -> Reading[str | None]:
        """Reads up to and including a marker, and returns the text before it; reads nothing without a marker."""
        begin = self._at
        while True:
            place = self._buffer.find(marker, begin)
            read = len(self._buffer) - begin - len(marker) if place < 0 else place - begin
            if max_characters is not None and read > max_characters:
                break
            if place >= 0:
                self._at = place + len(marker)
                return self._buffer[begin:place]
            self._at = len(self._buffer)
            if not (yield from self._wait()):
                break
        self._at = begin
        return None

    def _emit_until(
        self, kind: Literal["content", "reasoning"], markers: Collection[str], *, strips: bool = True
    ) -> Reading[str | None]:
        """Emits text as `kind` up to the first marker; see `_copy_until`."""
        return (yield from self._copy_until(partial(self._emit, kind), markers, strips=strips))

    def _copy_until(
        self, write: Callable[[str], None], markers: Collection[str], *, strips: bool = False
    ) -> Reading[str | None]:
        """Writes text up to the first marker, reads and returns the marker; without a marker, writes all text.

        Args:
          strips: leaves whitespace before the marker in the text read, rather than writing it.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self._buffer.find(marker)) >= 0]
            if places:
                place, marker = min(places)
                self._at = len(self._buffer[:place].rstrip()) if strips else place
                write(self._drop())
                self._at = self._buffer.index(marker) + len(marker)
                return marker
            if self._has_ended:
                self._at = len(self._buffer)
                write(self._drop())
                return None
            certain = self._buffer[: len(self._buffer) - _partial_marker(self._buffer, markers)]
            self._at = len(certain.rstrip() if strips else certain)
            write(self._drop())
            yield

    def _take_json(self, *, streams: bool = False) -> Reading[str | None]:
        """Reads a JSON value; returns its text, or None if it is malformed or cut off.

        Args:
          streams: emits the value as the last call's arguments while it is read, and returns only its end.
        """
        scanner, begin = JsonScanner(), self._at
        while True:
            if self._at == len(self._buffer):
                if streams:
                    self._emit_arguments(self._drop())
                    begin = 0
                if not (yield from self._wait()):
                    return self._buffer[begin:] if scanner.end_scalar() else None
            state = scanner.push(self._buffer[self._at])
            self._at += state in ("open", "complete")
            if state != "open":
                value = self._buffer[begin : self._at]
                if streams:
                    self._emit_arguments(self._drop())
                return None if state == "invalid" else value

    def _json_calls(self) -> Reading[bool]:
        """Reads one call, or an array of calls, and returns whether all are well-formed."""
        if not (yield from self._take("[")):
            return (yield from self._json_call())
        while True:
            yield from self._skip_space()
            if not (yield from self._json_call()):
                return False
            yield from self._skip_space()
            if (yield from self._take("]")):
                return True
            if not (yield from self._take(",")):
                return False

    def _json_call(
        self, *, accepts: Callable[[str], bool] = bool, keys: Collection[str] | None = None
    ) -> Reading[bool]:
        """Reads a call `{"name": ..., "arguments": {...}}`, whose arguments may be called "parameters".

        Args:
          accepts: whether a function of this name may be called.
          keys: all keys that a call may have, which then has to have arguments; None allows any.

        Returns:
          Whether the call is well-formed. Otherwise the text since its beginning is read and not omitted, or the text
          since the end of its arguments.
        """
        call = _JsonCall(accepts, keys)
        if not (yield from self._take("{")):
            return False
        while True:
            if not (yield from self._json_member(call)):
                return False
            yield from self._skip_space()
            if (yield from self._take("}")):
                break
            if not (yield from self._take(",")):
                return False
        if not call.has_begun:
            if call.name is None or (call.arguments is None and keys is not None):
                return False
            self._begin_call(call.name)
            self._emit_arguments(call.arguments or "{}")
        self._drop()
        return True

    def _json_member(self, call: "_JsonCall") -> Reading[bool]:
        """Reads a key and its value; emits the value while it is read if it is the arguments of a known name."""
        yield from self._skip_space()
        key = _text_of((yield from self._take_json()))
        yield from self._skip_space()
        if key is None or (call.keys is not None and key not in call.keys) or not (yield from self._take(":")):
            return False
        yield from self._skip_space()
        if key in _ARGUMENTS and call.name is not None and not call.has_begun and (yield from self._peek()) == "{":
            self._begin_call(call.name)
            call.has_begun = True
            return (yield from self._take_json(streams=True)) is not None
        value = yield from self._take_json()
        return value is not None and call.set(key, value)

    def _element_call(
        self,
        name: str,
        closer: str,
        take_key: Callable[[], Reading[tuple[str, V] | None]],
        take_value: Callable[[V], Reading[bool]],
    ) -> Reading[bool]:
        """Reads the rest of a call whose parameters are elements, and emits its arguments as a JSON object.

        Args:
          name: name of the function.
          closer: closing tag of the call.
          take_key: reads the opening tag of a parameter; returns its key and an argument of `take_value`.
          take_value: reads and emits a value with its closing tag; returns whether it is complete.

        Returns:
          Whether the call is well-formed. It is emitted from its first key on.
        """
        separator = "{"
        while True:
            yield from self._skip_space()
            has_ended = yield from self._take(closer)
            parameter = None if has_ended else (yield from take_key())
            if parameter is None and not has_ended:
                return False
            if separator == "{":
                self._begin_call(name)
            if parameter is None:
                self._emit_arguments("{}" if separator == "{" else "}")
                return True
            key, kind = parameter
            self._emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            self._drop()
            if not (yield from take_value(kind)):
                return False

    def _emit_escaped(self, text: str) -> None:
        """Emits text as a part of a JSON string among the arguments."""
        self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_call(self, *closers: str) -> Reading[None]:
        """Omits the text read so far, the closing markers that follow, and whitespace between them or at the end."""
        self._drop()
        yield from self._skip_space()
        for closer in closers:
            if (yield from self._take(closer)):
                self._drop()
                yield from self._skip_space()
        if not (yield from self._peek()):
            self._drop()
        self._at = 0


@dataclass
class _JsonCall:
    """State of a JSON call that is being read.

    Attributes:
      accepts, keys: as in `_json_call`.
      arguments: JSON text of arguments that were read before the name.
      has_begun: whether the call was emitted.
    """

    accepts: Callable[[str], bool]
    keys: Collection[str] | None
    name: str | None = None
    arguments: str | None = None
    has_begun: bool = False

    def set(self, key: str, value: str) -> bool:
        """Stores a member and returns whether it is valid."""
        if key == "name" and not self.has_begun:
            self.name = _text_of(value)
            return self.name is not None and self.accepts(self.name)
        if key in _ARGUMENTS and not self.has_begun:
            self.arguments = _object_of(value)
            return self.arguments is not None
        return True


def read_json(text: str) -> Any:
    """Returns the value of JSON text.

    Raises:
      ValueError: it is not JSON; NaN and Infinity, which `json.loads` accepts, are not.
      RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _partial_marker(text: str, markers: Collection[str]) -> int:
    """Returns the length of the longest suffix of a text that a marker may continue."""
    longest = max(map(len, markers), default=1)
    return next((size for size in range(min(longest - 1, len(text)), 0, -1) if _begins_any(text[-size:], markers)), 0)


def _begins_any(text: str, markers: Collection[str]) -> bool:
    return any(len(marker) > len(text) and marker.startswith(text) for marker in markers)


def _text_of(value: str | None) -> str | None:
    """Returns the text that JSON text encodes, or None for any other value."""
    return json.loads(value) if value is not None and value.startswith('"') else None


def _object_of(value: str) -> str | None:
    """Returns the JSON text of an object, which may be encoded in a string or null for no arguments, or None."""
    if value == "null":
        return "{}"
    inner = _text_of(value)
    if inner is not None:
        try:
            return inner if isinstance(read_json(inner), dict) else None
        except (ValueError, RecursionError):
            return None
    return value if value.startswith("{") else None
