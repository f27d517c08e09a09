"""The source `parquet:GLOB`: one document per row, in a column of a table."""

from collections.abc import Iterator
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
from stack_train.data.fields import check_field, text_of
from stack_train.data.files import expand_glob, stat_digest

__all__ = ["ParquetSource"]

_ROWS_AT_ONCE = 1024


class ParquetSource:
    """The rows of all Parquet files that match a glob, in order; needs stack-train[parquet].

    1,024 rows at a time are in memory. A document's name is "path:row", with rows counted from 1.
    """

    def __init__(self, address: str = "", *, text_field: str = "text") -> None:
        self._paths = expand_glob(address, "parquet")
        self._text_field = text_field
        self._parquet = _pyarrow_parquet()

    def documents(self) -> Iterator[Document]:
        for path in self._paths:
            try:
                with self._parquet.ParquetFile(path) as file:
                    yield from self._rows(str(path), file)
            except (OSError, ValueError) as error:  # pyarrow's errors for malformed files
                raise DataError(
                    f"Cannot read {str(path)!r} as Parquet: {error}. Leave it out of the source's glob, or repair it."
                ) from error

    def fingerprint(self) -> str:
        return stat_digest(((str(path), path) for path in self._paths), settings=[self._text_field])

    def _rows(self, path: str, file: Any) -> Iterator[Document]:
        check_field(path, file.schema_arrow.names, self._text_field)
        number = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[self._text_field]):
            for value in batch.column(0).to_pylist():
                number += 1
                name = f"{path}:{number}"
                yield Document(name, text_of(name, value, self._text_field))


def _pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"Parquet is read by pyarrow: {error}. Install it: {install_command('stack-train[parquet]')}"
        ) from error
    return parquet
