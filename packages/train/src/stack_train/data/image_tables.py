"""The sources `parquet:` and `datasets:` of images: rows with encoded images, in Hugging Face's format."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import DataError
from stack_train.data.captions import WEIGHTS, Captions
from stack_train.data.fields import check_field
from stack_train.data.file_source import damaged
from stack_train.data.files import expand_glob, listing, stat_digest
from stack_train.data.hf_datasets import open_saved_dataset, saved_files
from stack_train.data.image_source import ImageFields, NeededField
from stack_train.data.parquet import pyarrow_parquet

__all__ = ["TableImages", "open_parquet_images", "open_saved_images"]

_ROWS_AT_ONCE = 64


class ImageTable(ABC):
    """A table with a column of encoded images.

    Attributes:
      location: address of the table, for messages.
      columns: names of the columns.
      files: name and path of each file.
    """

    location: str
    columns: Sequence[str]
    files: Sequence[tuple[str, Path]]

    @abstractmethod
    def row_names(self) -> list[str]:
        """Returns "path:number" of each row; the first row has number 1."""

    @abstractmethod
    def column(self, name: str) -> list[Any]:
        """Returns a column without images."""

    @abstractmethod
    def image(self, name: str, row: int) -> Any:
        """Returns a value of the column of images."""


class TableImages:
    """Images in the rows of a table, as an `ImageSource`.

    The column of images has structs of "bytes" and "path", the format of the library datasets, or bytes. Captions are
    texts, or lists of texts with a list of weights in a second column. A class is a number or a text.

    Args:
      table: the table.
      fields: names of the columns.
      needs: see `NeededField`.

    Raises:
      DataError: a column does not exist, or no row has the needed value.
    """

    def __init__(self, table: ImageTable, fields: ImageFields, needs: NeededField | None) -> None:
        self._table, self._fields = table, fields
        self._column = fields.image or "image"
        check_field(table.location, table.columns, self._column, setting="image_field", noun="the images")
        names, self._captions, self._labels = table.row_names(), dict[str, Captions](), dict[str, Any]()
        self.defects: list[str] = []
        if needs == "caption":
            self._read_captions(names)
        elif needs == "label":
            self._read_labels(names)
        needed = {"caption": self._captions, "label": self._labels, None: dict.fromkeys(names)}[needs]
        self._rows = [row for row, name in enumerate(names) if name in needed]
        self._names = [names[row] for row in self._rows]
        if names and not self._rows:
            raise DataError(f"No row of {table.location} can be used:\n  {listing(self.defects)}")

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def open(self, place: int) -> io.BytesIO:
        value = self._table.image(self._column, self._rows[place])
        if isinstance(value, dict):
            if value.get("bytes") is None:
                raise ValueError(
                    f"column {self._column!r} has no bytes, only the path {value.get('path')!r}; save the dataset with "
                    "its files embedded"
                )
            value = value["bytes"]
        if not isinstance(value, bytes):
            kind = type(value).__name__
            raise ValueError(f"column {self._column!r} holds a {kind}; bytes or a struct of bytes and path is expected")
        return io.BytesIO(value)

    def digest(self, places: Sequence[int], settings: Sequence[str]) -> str:
        chosen = [self._names[place] for place in places]
        return stat_digest(self._table.files, ["table", self._column, *settings, *chosen])

    def captions(self, names: Sequence[str]) -> list[Captions]:
        return [self._captions[name] for name in names]

    def labels(self, names: Sequence[str]) -> list[Any]:
        return [self._labels[name] for name in names]

    def _read_captions(self, names: Sequence[str]) -> None:
        column = self._fields.caption or "text"
        values = self._values(column, "caption_field", "the captions")
        weights: Sequence[Any] = [None] * len(values)
        # A column of this name belongs to the captions only if they are lists.
        has_lists = any(isinstance(value, list) for value in values)
        if self._fields.weights is not None or (has_lists and WEIGHTS in self._table.columns):
            weights = self._values(self._fields.weights or WEIGHTS, "weights_field", "the weights of captions")
        for name, value, given in zip(names, values, weights, strict=True):
            try:
                found = Captions.parse(name, value, given)
            except DataError as error:
                self.defects.append(str(error))
                continue
            if found.texts:
                self._captions[name] = found
            else:
                self.defects.append(f"{name}: there is no caption in column {column!r}")

    def _read_labels(self, names: Sequence[str]) -> None:
        column = self._fields.label or "label"
        for name, value in zip(names, self._values(column, "label_field", "the classes"), strict=True):
            if isinstance(value, (int, str)) and not isinstance(value, bool):
                self._labels[name] = value
            else:
                self.defects.append(f"{name}: column {column!r} is {value!r}; a class is a number or a text")

    def _values(self, column: str, setting: str, noun: str) -> list[Any]:
        check_field(self._table.location, self._table.columns, column, setting=setting, noun=noun)
        return self._table.column(column)


def open_parquet_images(address: str, fields: ImageFields, needs: NeededField | None) -> TableImages:
    """Opens the rows of all Parquet files that match a glob; needs stack-train[parquet]."""
    return TableImages(_ParquetTable(expand_glob(address, "parquet")), fields, needs)


def open_saved_images(address: str, fields: ImageFields, needs: NeededField | None) -> TableImages:
    """Opens a dataset on disk, as `DatasetsSource` does; needs stack-train[datasets]."""
    return TableImages(_SavedTable(address), fields, needs)


class _ParquetTable(ImageTable):
    """The rows of Parquet files in order; 64 rows of images at a time are in memory.

    Rows are read fastest in order: pages of a row group before a row are read as well.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.location, self.files = str(paths[0]), [(str(path), path) for path in paths]
        heads = [self._reading(path, lambda file: (file.metadata.num_rows, file.schema_arrow.names)) for path in paths]
        self._counts = [rows for rows, _ in heads]
        self._starts = np.array([0, *accumulate(self._counts)], np.int64)
        self.columns = heads[0][1]
        for path, (_, columns) in zip(paths, heads, strict=True):
            if missing := [name for name in self.columns if name not in columns]:
                raise DataError(f"{path} lacks the columns {', '.join(missing)} of {paths[0]}. Leave one of them out.")
        self._file, self._first, self._batch = -1, 0, list[Any]()
        self._batches: Iterator[list[Any]] = iter(())

    def row_names(self) -> list[str]:
        counted = zip(self._paths, self._counts, strict=True)
        return [f"{path}:{row}" for path, count in counted for row in range(1, count + 1)]

    def column(self, name: str) -> list[Any]:
        columns = (self._reading(path, lambda file: file.read([name]).column(0).to_pylist()) for path in self._paths)
        return [value for column in columns for value in column]

    def image(self, name: str, row: int) -> Any:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        row -= int(self._starts[number])
        if number != self._file or row < self._first:
            self._file, self._first, self._batch = number, 0, list[Any]()
            self._batches = _batches(self._paths[number], name)
        while row >= self._first + len(self._batch):
            self._first += len(self._batch)
            self._batch = next(self._batches)
        return self._batch[row - self._first]

    def _reading(self, path: Path, read: Any) -> Any:
        parquet = pyarrow_parquet()
        try:
            with parquet.ParquetFile(path) as file:
                return read(file)
        except (OSError, ValueError) as error:  # pyarrow's errors for malformed files
            raise damaged(path, "Parquet", error) from error


def _batches(path: Path, column: str) -> Iterator[list[Any]]:
    """Yields the values of a column, 64 at a time."""
    try:
        # A buffer makes pyarrow read pages one by one; without it, the column of a row group is in memory.
        with pyarrow_parquet().ParquetFile(path, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
                yield batch.column(0).to_pylist()
    except (OSError, ValueError) as error:
        raise damaged(path, "Parquet", error) from error


class _SavedTable(ImageTable):
    """The rows of a dataset on disk, memory-mapped."""

    def __init__(self, address: str) -> None:
        directory, self._dataset = open_saved_dataset(address)
        self.location, self.columns = str(directory), self._dataset.column_names
        self.files = saved_files(directory)
        # Arrow's values are the encoded bytes; otherwise the library decodes images.
        self._encoded = self._dataset.with_format("arrow")

    def row_names(self) -> list[str]:
        return [f"{self.location}:{row}" for row in range(1, len(self._dataset) + 1)]

    def column(self, name: str) -> list[Any]:
        return self._dataset.select_columns([name])[:][name]

    def image(self, name: str, row: int) -> Any:
        return self._encoded[row].column(name)[0].as_py()
