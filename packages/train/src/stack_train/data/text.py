"""The source `text:GLOB`: one document per file, or the parts of a single file."""

import re
from collections.abc import Iterator
from pathlib import Path

from stack_core.abi.data import Document
from stack_train.data.file_source import FileSource
from stack_train.data.files import read_text

__all__ = ["TextSource", "divided"]

_PARTS = 40
_MIN_CHARACTERS, _MAX_CHARACTERS = 1024, 65536
_PARAGRAPH = re.compile(r"\n[ \t\r]*\n")


class TextSource(FileSource):
    """The UTF-8 files that match a glob, sorted by path; one file at a time is in memory.

    If the glob matches a single file, such as a book, its documents are the parts from `divided`, and validation takes
    some of these.
    """

    scheme = "text"

    def __init__(self, address: str = "") -> None:
        super().__init__(address)
        self._divides = len(self._paths) == 1

    def documents_of(self, path: Path) -> Iterator[Document]:
        text = read_text(path)
        if not self._divides:
            yield Document(str(path), text)
            return
        for number, part in enumerate(divided(text)):
            yield Document(f"{path}#{number}" if number else str(path), part)

    def settings(self) -> list[str]:
        return ["divided"] if self._divides else []


def divided(text: str) -> Iterator[str]:
    """Divides a text of 40,960 characters or more into at least 20 parts; shorter texts are one part.

    A part has 1,024 to 65,536 characters, and up to as many again to the end of a paragraph, or of a line in texts
    without paragraphs. Joined, the parts are the text.
    """
    if len(text) < _PARTS * _MIN_CHARACTERS:
        yield text
        return
    size, start = min(len(text) // _PARTS, _MAX_CHARACTERS), 0
    while len(text) - start > 2 * size:
        paragraph = _PARAGRAPH.search(text, start + size, start + 2 * size)
        line = text.find("\n", start + size, start + 2 * size) + 1
        stop = paragraph.end() if paragraph else line or start + size
        yield text[start:stop]
        start = stop
    yield text[start:]
