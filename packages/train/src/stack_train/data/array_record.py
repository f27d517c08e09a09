"""The source `arrayrecord:GLOB`: one document per record of an ArrayRecord file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
from stack_core.text.json_records import parse_record
from stack_train.data.fields import check_field, text_of
from stack_train.data.file_source import FileSource, damaged
from stack_train.data.files import undecodable, unreadable

__all__ = ["ArrayRecordSource"]

_RECORDS_AT_ONCE = 1024


class ArrayRecordSource(FileSource):
    """The records of all ArrayRecord files that match a glob, in order; needs stack-train[arrayrecord].

    A record is a UTF-8 text, or a JSON object if `text_field` names the field of its text. 1,024 records at a time are
    in memory. A document's name is "path:record", with records counted from 1.
    """

    scheme = "arrayrecord"

    def __init__(self, address: str = "", *, text_field: str | None = None) -> None:
        super().__init__(address, text_field)
        _array_record_reader()

    def documents_of(self, path: Path) -> Iterator[Document]:
        for number, record in enumerate(_records(path), start=1):
            name = f"{path}:{number}"
            yield Document(name, self._text(name, record))

    def _text(self, name: str, record: bytes) -> str:
        if self._text_field is not None:
            fields = parse_record(name, record)
            check_field(name, fields, self._text_field)
            return text_of(name, fields[self._text_field], self._text_field)
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise undecodable(name, error) from error


def _records(path: Path) -> Iterator[bytes]:
    try:
        path.open("rb").close()  # the reader does not report why a file cannot be opened
    except OSError as error:
        raise unreadable(path, error) from error
    reader = _array_record_reader()(str(path))
    try:
        count = reader.num_records()
        for first in range(0, count, _RECORDS_AT_ONCE):
            yield from reader.read(first, min(first + _RECORDS_AT_ONCE, count))
        # A file without a valid index appears to be empty.
        if not reader.ok():
            raise damaged(path, "ArrayRecord", "its index or a record is missing or damaged")
        reader.close()  # raises for a file that is not valid
    except (IndexError, RuntimeError, ValueError) as error:
        raise damaged(path, "ArrayRecord", error) from error


def _array_record_reader() -> Any:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise DataError(
            f"ArrayRecord files are read by array-record: {error}. "
            f"Install it: {install_command('stack-train[arrayrecord]')}"
        ) from error
    return ArrayRecordReader
