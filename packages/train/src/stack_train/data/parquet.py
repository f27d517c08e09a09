"""The source `parquet:GLOB`: one document per row, in a column of a table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
from stack_train.data.fields import check_field, text_of
from stack_train.data.file_source import FileSource, damaged

__all__ = ["ParquetSource", "pyarrow_parquet"]

_ROWS_AT_ONCE = 1024


class ParquetSource(FileSource):
    """The rows of all Parquet files that match a glob, in order; needs stack-train[parquet].

    1,024 rows at a time are in memory. A document's name is "path:row", with rows counted from 1.
    """

    scheme = "parquet"

    def __init__(self, address: str = "", *, text_field: str = "text") -> None:
        super().__init__(address, text_field)
        pyarrow_parquet()

    def documents_of(self, path: Path) -> Iterator[Document]:
        try:
            with pyarrow_parquet().ParquetFile(path) as file:
                yield from self._rows(str(path), file)
        except (OSError, ValueError) as error:  # pyarrow's errors for malformed files
            raise damaged(path, "Parquet", error) from error

    def _rows(self, path: str, file: Any) -> Iterator[Document]:
        text_field = str(self._text_field)
        check_field(path, file.schema_arrow.names, text_field)
        number = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                number += 1
                name = f"{path}:{number}"
                yield Document(name, text_of(name, value, text_field))


def pyarrow_parquet() -> Any:
    """Imports and returns `pyarrow.parquet`.

    Raises:
      DataError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"Parquet is read by pyarrow: {error}. Install it: {install_command('stack-train[parquet]')}"
        ) from error
    return parquet
