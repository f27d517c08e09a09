"""Messages of gpt-oss in the harmony format: reasoning, calls and the answer are separate messages.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

`<|start|>assistant` ends the prompt. The recipient may also precede the channel. `commentary` without a recipient is
text for the user, as is `final`. Source: OpenAI harmony response format (OpenAI cookbook, 2025), and the chat template
of openai/gpt-oss-120b.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["HarmonyParser", "HarmonyReasoningParser"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_FUNCTIONS = "functions."


@dataclass(frozen=True)
class _Header:
    """The header of a message; None for a part that it lacks."""

    channel: str | None
    recipient: str | None


class _HarmonyMessages(StreamParser):
    """Reads messages; text outside of messages is content."""

    markers: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template writes messages with channels."""
        return _CHANNEL in template and _MESSAGE in template

    def _parse(self) -> Reading[None]:
        self._kinds: set[str] = set()
        yield from self._skip_space()
        # The first header follows the prompt's `<|start|>assistant`, and may begin with the recipient.
        is_header = yield from self._take("to=")
        if not is_header:
            self._at = 0
        while is_header or (yield from self._emit_until("content", (_START, _CHANNEL))):
            is_header = False
            if (yield from self._take_until(_MESSAGE)) is None:
                self._reject()
                continue
            text = self._buffer[: self._at]
            channel, recipient = re.search(r"<\|channel\|>\s*(\w+)", text), re.search(r"\bto=([^\s<]+)", text)
            yield from self._message(_Header(channel and channel[1], recipient and recipient[1]))

    def _message(self, header: _Header) -> Reading[None]:
        """Reads the body of a message, whose header has been read."""
        raise NotImplementedError

    def _text(self, kind: Literal["content", "reasoning"]) -> Reading[None]:
        """Emits the body of a message; messages of the same kind are separated by a line end."""
        self._drop()
        if kind in self._kinds:
            self._emit(kind, "\n")
        self._kinds.add(kind)
        if (yield from self._emit_until(kind, (*_ENDS, _START))) == _START:
            self._at = 0
        self._drop()


class HarmonyReasoningParser(_HarmonyMessages):
    """Parser of reasoning, and of text for the user; calls remain in the content, for `HarmonyParser`."""

    def _message(self, header: _Header) -> Reading[None]:
        if header.recipient is None:
            yield from self._text("reasoning" if header.channel == "analysis" else "content")
            return
        self._reject()
        end = yield from self._emit_until("content", (*_ENDS, _START), strips=False)
        if end == _START:
            self._at = 0
        self._reject()


class HarmonyParser(_HarmonyMessages):
    """Parser of calls: messages to functions. Without `HarmonyReasoningParser`, reasoning is content."""

    def _message(self, header: _Header) -> Reading[None]:
        if header.recipient is None:
            yield from self._text("content")
            return
        name = header.recipient.removeprefix(_FUNCTIONS)
        yield from self._skip_space()
        has_arguments = (yield from self._peek()) == "{"
        if (
            not header.recipient.startswith(_FUNCTIONS)
            or not name
            or not (has_arguments or (yield from self._is_over()))
        ):
            self._reject()
            return
        self._begin_call(name)
        if not has_arguments:
            self._emit_arguments("{}")
        elif (yield from self._take_json(streams=True)) is None:
            self._reject()
            return
        yield from self._end_call(*_ENDS)

    def _is_over(self) -> Reading[bool]:
        """Returns whether the message ends at the cursor."""
        begin, is_over = self._at, not (yield from self._peek())
        for end in (*_ENDS, _START):
            is_over = is_over or (yield from self._take(end))
        self._at = begin
        return is_over
