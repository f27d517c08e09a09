"""Data that reads only the rows of one process."""

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import Batches

if TYPE_CHECKING:
    from stack_train.data.rows import TrainIterator

__all__ = ["ProcessRows", "ShuffledRows"]

T = TypeVar("T", bound="ProcessRows")


class ProcessRows(Batches):
    """Base class of data that reads only the rows of one process.

    Attributes:
      rows: indices of the rows to read within a training batch; None reads all rows.
    """

    rows: Int64[np.ndarray, " own"] | None = None

    def with_rows(self: T, rows: Int64[np.ndarray, " own"]) -> T:
        # Shallow: the copies share the tokens.
        other = copy.copy(self)
        other.rows = rows
        return other


class ShuffledRows(ProcessRows):
    """Base class of data that shuffles its rows in each epoch; batch i depends only on (seed, i).

    Attributes:
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.
      train_rows: number of rows in one epoch.
    """

    fingerprint: dict[str, Any]
    train_rows: int
    _seed: int
    _config: Any
    """The config of the data, with `batch_size` and `prefetch_batches`."""

    @abstractmethod
    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        """Returns the arrays of training rows, whose ids count over all epochs."""

    def train_iterator(self) -> "TrainIterator":
        from stack_train.data.rows import iterate_rows  # imports Grain, which only a run needs

        return iterate_rows(
            self.train_rows,
            self.train_batch,
            seed=self._seed,
            batch_size=self._config.batch_size,
            prefetch_batches=self._config.prefetch_batches,
            fingerprint=self.fingerprint,
            rows_of_batch=self.rows,
        )
