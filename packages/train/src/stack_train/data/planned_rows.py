"""Batches of rows of tokenized examples, whose division into rows is planned once."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Int64

from stack_train.data.cache import digest_of
from stack_train.data.examples import stacked
from stack_train.data.process_rows import ShuffledRows
from stack_train.data.split import split_documents, text_digest
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

if TYPE_CHECKING:
    from stack_train.data.rows import Batch

__all__ = ["PlannedRows"]


class PlannedRows(ShuffledRows):
    """Base class of batches of examples that are all in memory; see `Batches`. Subclasses define `_plan` and `_row`.

    Attributes:
      tokenizer: tokenizer of the examples.
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.

    Args:
      config: config of the data, with `batch_size`, `validation_fraction`, `prefetch_batches` and `_SETTINGS`.
      tokenizer: tokenizer of the examples.
      examples: objects with a `name` and an `identity`; examples with equal identities go to the same split.
      seed: seed of the order of rows.
    """

    _EXAMPLES: ClassVar[str]
    """Name of the examples in messages, a plural."""
    _SETTINGS: ClassVar[tuple[str, ...]]
    """Fields of the config that determine the rows."""

    def __init__(self, config: Any, tokenizer: HuggingFaceTokenizer, examples: Sequence[Any], *, seed: int) -> None:
        self.tokenizer = tokenizer
        self._config, self._seed = config, seed
        self._examples: Sequence[Any] = examples
        digests = np.asarray([text_digest(each.identity) for each in examples], np.uint64)
        training, validation = split_documents(digests, config.validation_fraction)
        # The split orders by digest; sorting restores the order of the files.
        self._training, self._validation = self._plan(np.sort(training)), self._plan(np.sort(validation))
        self.train_rows = len(self._training)
        self.fingerprint = {
            "seed": seed,
            **{f"data.{name}": getattr(config, name) for name in self._SETTINGS},
            f"the {self._EXAMPLES} (digest)": digest_of([int(digest) for digest in digests]),
        }

    def validation_batches(self) -> "Iterator[Batch]":
        """Yields all held-out rows once; the last batch is filled with padding. Held-out row r has row id -1 - r."""
        from stack_train.data.rows import filled

        size = self._config.batch_size
        for first in range(0, len(self._validation), size):
            rows = np.arange(first, min(first + size, len(self._validation)))
            batch = self._rows(self._validation, rows) | {"row_ids": -1 - rows}
            yield {name: filled(values, size, name) for name, values in batch.items()}

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the examples of each row."""
        found = (
            self._training[row_id % len(self._training)] if row_id >= 0 else self._validation[-1 - row_id]
            for row_id in map(int, row_ids)
        )
        return ["; ".join(self._examples[index].name for index in row) for row in found]

    def write(self, directory: Path) -> None:
        write_tokenizer(self.tokenizer, directory)

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> "Batch":
        """Returns the arrays of training rows."""
        return self._rows(self._training, row_ids % len(self._training))

    @abstractmethod
    def _plan(self, chosen: Int64[np.ndarray, " chosen"]) -> Sequence[Int64[np.ndarray, " in_row"]]:
        """Returns the indices of the examples of each row."""

    @abstractmethod
    def _row(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Returns the arrays of one row."""

    def _rows(self, plan: Sequence[Any], rows: Int64[np.ndarray, " batch"]) -> "Batch":
        return stacked([self._row([self._examples[index] for index in plan[row]]) for row in rows])
