"""Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro and 3, Qwen 2.5 and 3.

The format is in the chat templates of these models, such as NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-0.6B.
Some models write an array of calls within one tag, which is allowed.
"""

import re
from typing import ClassVar

from stack_core.text.parsers.base import Reading, StreamParser

__all__ = ["HermesParser"]

# The template's own text, in which quotes, line ends and blocks of Jinja may stand between the tag and the name.
_SHOWN = re.compile(r"""<tool_call>(?:\\n|[\s"'{}~+%-])*\\?["']name""")


class HermesParser(StreamParser):
    """Parser of JSON calls within XML tags; parallel calls are consecutive tags."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    @classmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the template shows a JSON call within the tag."""
        return _SHOWN.search(template) is not None

    def _parse(self) -> Reading[None]:
        while (yield from self._emit_until("content", ("<tool_call>",))):
            yield from self._skip_space()
            if (yield from self._json_calls()):
                yield from self._end_call("</tool_call>")
            else:
                self._reject()
