"""The source `text:GLOB`: one document per file."""

from collections.abc import Iterator

from stack_core.abi.data import Document
from stack_train.data.files import expand_glob, read_text, stat_digest

__all__ = ["TextSource"]


class TextSource:
    """The UTF-8 files that match a glob, sorted by path; one file at a time is in memory."""

    def __init__(self, address: str = "") -> None:
        self._paths = expand_glob(address, "text")

    def documents(self) -> Iterator[Document]:
        for path in self._paths:
            yield Document(str(path), read_text(path))

    def fingerprint(self) -> str:
        return stat_digest((str(path), path) for path in self._paths)
