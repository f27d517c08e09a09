"""Documents cut into rows of equal length, as a pure function of (seed, epoch, row)."""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Shaped, UInt

from stack_core.abi.data import IGNORED_TARGET

__all__ = ["Packing", "Piece"]


@dataclass(frozen=True)
class Piece:
    """The part of a document that lies in one row: tokens [start_token, end_token) of `document`, targets excluded."""

    document: int
    start_token: int
    end_token: int


@dataclass(frozen=True)
class _Order:
    """One epoch's documents one after another: documents[i] takes the places [ends[i - 1], ends[i]) of the stream."""

    documents: Int64[np.ndarray, " documents"]
    ends: Int64[np.ndarray, " documents"]


class Packing:
    """The rows of an epoch, each a window of `seq_tokens` places of the documents laid one after another.

    A document of n tokens takes n - 1 places: place k holds token k and has token k + 1 as its target. So the last
    token (end-of-text) is a target only, and documents of fewer than two tokens take no place. A window that ends
    inside a document leaves the rest of it to the next row, where it is a segment of its own.

        rows = ceil(places / seq_tokens)        the same in every epoch
        row_id = epoch * rows + row

    Only the last row of an epoch holds padding.

    Args:
      tokens: of all documents.
      offsets: document i is tokens[offsets[i]:offsets[i + 1]].
      documents: the ones to pack.
      seed: of the order of documents, anew in each epoch; None keeps the order of `documents`.
    """

    def __init__(
        self,
        tokens: UInt[np.ndarray, " tokens"],
        offsets: Int64[np.ndarray, " all_documents_and_1"],
        documents: Int64[np.ndarray, " documents"],
        *,
        seq_tokens: int,
        seed: int | None,
    ) -> None:
        places = np.diff(offsets)[documents] - 1
        self._tokens = tokens
        self._offsets = offsets
        self._documents = documents[places > 0]
        self._places = places[places > 0]
        self._seq_tokens = seq_tokens
        self._seed = seed
        self.targets = int(self._places.sum())
        self.rows = -(-self.targets // seq_tokens)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def batch(self, row_ids: Int64[np.ndarray, " batch"]) -> dict[str, Shaped[np.ndarray, "batch ..."]]:
        """Returns rows as int32[batch, seq] arrays, and `row_ids`.

        These are tokens; targets, -100 in padding; positions, from 0 in each segment; segment_ids, from 1 in each
        row and 0 in padding.
        """
        epochs, rows = np.divmod(row_ids, self.rows)
        parts = {int(epoch): self._windows(int(epoch), rows[epochs == epoch]) for epoch in np.unique(epochs)}
        if len(parts) == 1:
            (batch,) = parts.values()
        else:
            batch = {name: np.empty((len(rows), self._seq_tokens), np.int32) for name in next(iter(parts.values()))}
            for epoch, part in parts.items():
                for name, values in part.items():
                    batch[name][epochs == epoch] = values
        return batch | {"row_ids": np.asarray(row_ids, np.int64)}

    def pieces(self, row_id: int) -> list[Piece]:
        """The documents of a row, in order."""
        epoch, row = divmod(row_id, self.rows)
        order = self._order(epoch)
        start, end = row * self._seq_tokens, min((row + 1) * self._seq_tokens, self.targets)
        first, last = np.searchsorted(order.ends, [start, end - 1], side="right")
        begins = np.append(0, order.ends)
        return [
            Piece(int(order.documents[i]), int(max(start - begins[i], 0)), int(min(end, begins[i + 1]) - begins[i]))
            for i in range(first, last + 1)
        ]

    def _windows(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> dict[str, Int32[np.ndarray, "batch seq"]]:
        order = self._order(epoch)
        starts = rows[:, None] * self._seq_tokens
        places = starts + np.arange(self._seq_tokens)
        filled = places < self.targets
        places = np.minimum(places, self.targets - 1)
        which = np.searchsorted(order.ends, places, side="right")
        document = order.documents[which]
        begins = order.ends[which] - (self._offsets[document + 1] - self._offsets[document] - 1)
        token = self._offsets[document] + places - begins
        return {
            "tokens": np.where(filled, self._tokens[token], 0).astype(np.int32),
            "targets": np.where(filled, self._tokens[token + 1].astype(np.int32), np.int32(IGNORED_TARGET)),
            "positions": np.where(filled, places - np.maximum(begins, starts), 0).astype(np.int32),
            "segment_ids": np.where(filled, which - which[:, :1] + 1, 0).astype(np.int32),
        }

    def _make_order(self, epoch: int) -> _Order:
        """Sorts the documents by random 64-bit numbers: NumPy keeps these streams, but not those of `permutation`."""
        if self._seed is None:
            return _Order(self._documents, np.cumsum(self._places))
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(bits.random_raw(len(self._documents)), kind="stable")
        return _Order(self._documents[order], np.cumsum(self._places[order]))
