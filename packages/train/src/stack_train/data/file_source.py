"""Base class of sources that read files."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

from stack_core.abi.data import DataSource, Document
from stack_core.abi.errors import DataError
from stack_train.data.files import expand_glob, stat_digest, unreadable

__all__ = ["FileSource", "damaged"]

_PART_BYTES = 64 << 20


class FileSource:
    """The documents of all files that match a glob, in order of their paths.

    Subclasses set `scheme` and define `documents_of`.

    Args:
      address: the glob.
      text_field: field of a record's text, part of the fingerprint; None for files without fields.
    """

    scheme: str

    def __init__(self, address: str, text_field: str | None = None) -> None:
        self._paths = expand_glob(address, self.scheme)
        self._text_field = text_field

    def documents_of(self, path: Path) -> Iterator[Document]:
        """Yields the documents of one file."""
        raise NotImplementedError

    def documents(self) -> Iterator[Document]:
        for path in self._paths:
            yield from self.documents_of(path)

    def settings(self) -> list[str]:
        """Returns settings that affect the documents, for the fingerprint."""
        return [] if self._text_field is None else [self._text_field]

    def fingerprint(self) -> str:
        return stat_digest(((str(path), path) for path in self._paths), settings=self.settings())

    def document_parts(self) -> Sequence[DataSource]:
        """Splits the source between files, into parts of 64 MiB or a single larger file."""
        groups: list[list[Path]] = []
        size_bytes = _PART_BYTES
        for path in self._paths:
            if size_bytes >= _PART_BYTES:
                groups.append([])
                size_bytes = 0
            groups[-1].append(path)
            size_bytes += _size_bytes(path)
        parts = []
        for paths in groups:
            part = copy.copy(self)
            part._paths = tuple(paths)
            parts.append(part)
        return parts


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def damaged(path: Path, kind: str, reason: object) -> DataError:
    """Returns the error for a file whose contents cannot be read."""
    return DataError(
        f"Cannot read {str(path)!r} as {kind}: {reason}. It may be cut short: write or copy it again, or leave it out "
        "of the source's glob."
    )
