"""Data that reads only the rows of one process."""

import copy
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import Batches

__all__ = ["ProcessRows"]

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
