"""The source `jsonl:GLOB`: one document per line, in a field of a JSON object."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError, nearest
from stack_core.text.json_records import parse_record
from stack_train.data.file_source import FileSource
from stack_train.data.files import unreadable

__all__ = ["JsonlSource", "jsonl_records"]


class JsonlSource(FileSource):
    """The records of all files that match a glob, in order and without blank lines.

    One line at a time is in memory. A document's name is "path:line", with lines counted from 1.
    """

    scheme = "jsonl"

    def __init__(self, address: str = "", *, text_field: str = "text") -> None:
        super().__init__(address, text_field)

    def documents_of(self, path: Path) -> Iterator[Document]:
        for name, record in jsonl_records([path]):
            yield Document(name, _text(name, record, str(self._text_field)))


def jsonl_records(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of JSONL files, each with its name, "path:line"; one line at a time is in memory.

    Raises:
      DataError: a file cannot be read, or a line is not a JSON object; see `parse_record`.
    """
    for path in paths:
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.isspace():
                        name = f"{path}:{number}"
                        yield name, parse_record(name, line)
        except OSError as error:
            raise unreadable(path, error) from error


def _text(name: str, record: dict[str, Any], text_field: str) -> str:
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{name}: the record has no field {text_field!r}.{nearest(text_field, record)} Its fields: {fields}. "
            "Set data.text_field to the one that holds the text."
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{name}: field {text_field!r} holds a {type(text).__name__}; a string was expected.")
    return text
