"""Reasoning within `<think>` and `</think>` before the answer: DeepSeek R1 and V3.1, Qwen 3, QwQ, GLM and others.

Some templates end the prompt with `<think>`, so that the message begins within the reasoning.
"""

from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["ThinkParser"]


class ThinkParser(StreamParser):
    """Parser of reasoning at the beginning of a message; a tag that comes later is content."""

    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template ends or removes earlier reasoning by the closing tag."""
        return cls.markers[1] in template

    def reasoning_markers(self) -> tuple[str | None, str] | None:
        begin, end = self.markers
        prompt = self._prompt.rstrip()
        if prompt.endswith(end):  # templates write empty reasoning if it is turned off
            return None
        return None if prompt.endswith(begin) else begin, end

    def _parse(self) -> Reading[None]:
        begin, end = self.markers
        if not self._prompt.rstrip().endswith(begin):
            yield from self._skip_space()
            if not (yield from self._take(begin)):
                self._at = 0
                yield from self._emit_until("content", (), strips=False)
                return
        yield from self._skip_space()
        self._drop()
        if (yield from self._emit_until("reasoning", (end,))):
            yield from self._skip_space()
            self._drop()
            yield from self._emit_until("content", (), strips=False)
