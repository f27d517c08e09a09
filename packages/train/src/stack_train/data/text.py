"""The source `text:GLOB`: one document per file."""

from collections.abc import Iterator
from pathlib import Path

from stack_core.abi.data import Document
from stack_train.data.file_source import FileSource
from stack_train.data.files import read_text

__all__ = ["TextSource"]


class TextSource(FileSource):
    """The UTF-8 files that match a glob, sorted by path; one file at a time is in memory."""

    scheme = "text"

    def __init__(self, address: str = "") -> None:
        super().__init__(address)

    def documents_of(self, path: Path) -> Iterator[Document]:
        yield Document(str(path), read_text(path))
