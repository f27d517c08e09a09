"""The source `stream:NAME`: a dataset that Hugging Face `datasets` streams, from files or from the hub."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
from stack_train.data.fields import check_field, text_of

__all__ = ["StreamSource"]


class StreamSource:
    """The rows of a split, in order and without a copy on disk; needs stack-train[datasets].

    The address is "NAME" or "NAME:SPLIT", where NAME is a folder of data files (JSONL, Parquet, CSV, ...) or a dataset
    of the hub; the split is "train" by default. A document's name is "name:row", with rows counted from 1.
    """

    def __init__(self, address: str = "", *, text_field: str = "text") -> None:
        if not address:
            raise DataError(
                "Source 'stream:' lacks its dataset. Write 'stream:FOLDER', 'stream:ORG/NAME' or '...:SPLIT'."
            )
        self._name, _, split = address.partition(":")
        self._split, self._text_field = split or "train", text_field
        self._builder = self._opened()

    def documents(self) -> Iterator[Document]:
        number = 0
        try:
            for number, row in enumerate(self._rows(), start=1):
                name = f"{self._name}:{number}"
                check_field(name, row, self._text_field)
                yield Document(name, text_of(name, row[self._text_field], self._text_field))
        except (OSError, ValueError, _generation_error()) as error:
            reason = error.__cause__ or error
            raise DataError(
                f"The stream of {self._name!r} broke off after row {number}: {reason}. Check its files or the "
                "connection."
            ) from error

    def _rows(self) -> Iterable[Any]:
        try:
            return self._builder.as_streaming_dataset(split=self._split)
        except ValueError as error:  # names the splits
            raise DataError(f"{self._name!r} cannot be streamed: {error} Write 'stream:{self._name}:SPLIT'.") from error

    def fingerprint(self) -> str:
        # The hash covers the data files: paths, sizes and times of local files, the commit of a dataset of the hub.
        return f"{self._opened().hash} {self._split} {self._text_field}"

    def _opened(self) -> Any:
        library, name = _datasets(), self._name
        found = Path(name).expanduser()
        try:
            return library.load_dataset_builder(str(found.absolute()) if found.exists() else name)
        except (OSError, ValueError) as error:  # includes ConnectionError, and folders without data files
            raise DataError(
                f"{name!r} is neither a folder of data files nor a dataset of the hub that can be reached: {error}. "
                "Correct the name."
            ) from error


def _generation_error() -> type[Exception]:
    from datasets.exceptions import DatasetGenerationError

    return DatasetGenerationError


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"Datasets are streamed by the library datasets: {error}. "
            f"Install it: {install_command('stack-train[datasets]')}"
        ) from error
    return datasets
