"""Calls as `{"name": ..., "parameters": {...}}`, at the beginning or after `<|python_tag|>`: Llama 3.1 to 3.3.

The format is in the chat templates of these models, such as meta-llama/Llama-3.1-8B-Instruct. They write one call a
message; vLLM also reads several, separated by ";".
"""

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["Llama3Parser"]

_SHOWN = re.compile(r"""["']name["']: function name, ["']parameters["']: dictionary""")
_KEYS = ("type", "id", "name", "parameters", "arguments")


class Llama3Parser(StreamParser):
    """Parser of JSON calls without tags. A message that begins with "{" is a call only if it names a known function."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template asks for JSON with "parameters" and has no format with tags."""
        return _SHOWN.search(template) is not None and "<tool_call>" not in template

    def _parse(self) -> Reading[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            yield from self._read_calls(self._is_known, _KEYS)
        else:
            self._at = 0
        while (yield from self._emit_until("content", self.markers)):
            yield from self._skip_space()
            yield from self._read_calls(bool, None)

    def _read_calls(self, accepts: Callable[[str], bool], keys: Collection[str] | None) -> Reading[None]:
        while (yield from self._json_call(accepts=accepts, keys=keys)):
            yield from self._end_call(";")
            yield from self._skip_space()
            if (yield from self._peek()) != "{":
                self._at = 0
                return
        self._reject()

    def _is_known(self, name: str) -> bool:
        return not self._tools or any(tool["function"]["name"] == name for tool in self._tools)
