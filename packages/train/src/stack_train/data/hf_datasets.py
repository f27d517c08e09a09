"""The source `datasets:DIRECTORY`: a dataset saved by `Dataset.save_to_disk` of Hugging Face `datasets`."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.data import DataSource, Document
from stack_core.abi.errors import DataError, nearest
from stack_core.abi.installing import install_command
from stack_train.data.fields import check_field, text_of
from stack_train.data.files import stat_digest

__all__ = ["DatasetsSource", "open_saved_dataset", "saved_files"]

_ROWS_OF_A_PART = 50_000


class DatasetsSource:
    """The rows of a dataset on disk, in order and memory-mapped; needs stack-train[datasets].

    The address is a directory, or "DIRECTORY:SPLIT" if the directory contains several splits. A document's name is
    "directory:row", with rows counted from 1. Nothing is downloaded.
    """

    def __init__(self, address: str = "", *, text_field: str = "text") -> None:
        self._text_field = text_field
        self._directory, self._dataset = open_saved_dataset(address)
        self._first_row = 0
        check_field(str(self._directory), self._dataset.column_names, text_field)

    def documents(self) -> Iterator[Document]:
        column = self._dataset.select_columns([self._text_field])
        for number, record in enumerate(column, start=1 + self._first_row):
            name = f"{self._directory}:{number}"
            yield Document(name, text_of(name, record[self._text_field], self._text_field))

    def fingerprint(self) -> str:
        return stat_digest(saved_files(self._directory), settings=[self._text_field])

    def document_parts(self) -> Sequence[DataSource]:
        """Splits the dataset into ranges of 50,000 rows."""
        parts = []
        for first in range(0, len(self._dataset), _ROWS_OF_A_PART):
            part = copy.copy(self)
            part._dataset = self._dataset.select(range(first, min(first + _ROWS_OF_A_PART, len(self._dataset))))
            part._first_row = first
            parts.append(part)
        return parts


def open_saved_dataset(address: str) -> tuple[Path, Any]:
    """Loads a split; returns its directory and the dataset.

    Args:
      address: "DIRECTORY" or "DIRECTORY:SPLIT".

    Raises:
      DataError: the library datasets is not installed, or the directory or the split does not exist.
    """
    if not address:
        raise DataError("Source 'datasets:' lacks its directory. Write 'datasets:DIRECTORY' or '...:SPLIT'.")
    directory, split = Path(address).expanduser().absolute(), ""
    if not directory.exists() and ":" in address:
        folder, _, split = address.rpartition(":")
        directory = Path(folder).expanduser().absolute()
    try:
        found = _datasets().load_from_disk(str(directory))
    except (OSError, ValueError) as error:  # includes FileNotFoundError: missing, or not a dataset
        raise DataError(
            f"{str(directory)!r} is not a dataset on disk: {error}. Pass a directory from "
            "Dataset.save_to_disk, with all of its files complete."
        ) from error
    if not isinstance(found, _datasets().DatasetDict):
        if split:
            raise DataError(f"{str(directory)!r} holds one dataset without splits. Remove ':{split}'.")
        return directory, found
    if split not in found:
        known = ", ".join(found)
        raise DataError(
            f"{str(directory)!r} holds the splits {known}.{nearest(split, found)} Name one, as in "
            f"'datasets:{directory}:{next(iter(found), 'train')}'."
        )
    return directory / split, found[split]


def saved_files(directory: Path) -> list[tuple[str, Path]]:
    """Returns the files of a dataset on disk, each with its name relative to the directory."""
    files = sorted(path for path in directory.rglob("*") if path.suffix in {".arrow", ".json"})
    return [(path.relative_to(directory).as_posix(), path) for path in files]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"Datasets on disk are read by the library datasets: {error}. "
            f"Install it: {install_command('stack-train[datasets]')}"
        ) from error
    return datasets
