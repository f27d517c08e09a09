"""Data of which one process makes its own rows alone."""

import copy
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

__all__ = ["OwnRows"]

T = TypeVar("T", bound="OwnRows")


class OwnRows:
    """A base of `Batches` that are `ReadsRows`.

    Attributes:
      rows: places of a training batch that are made; None is all.
    """

    rows: Int64[np.ndarray, " own"] | None = None

    def with_rows(self: T, rows: Int64[np.ndarray, " own"]) -> T:
        """The same data, whose training batches hold these rows alone."""
        other = copy.copy(self)
        other.rows = rows
        return other
