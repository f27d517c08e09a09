"""Packing of documents into rows of equal length, as a pure function of (seed, epoch, row)."""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Shaped, UInt

from stack_core.abi.data import IGNORED_TARGET
from stack_train.data.prepared.tokens import ShardedTokens

__all__ = ["Packing", "Piece"]


@dataclass(frozen=True)
class Piece:
    """The part of a document in one row: input tokens [start_token, end_token) of `document`."""

    document: int
    start_token: int
    end_token: int


@dataclass(frozen=True)
class _Order:
    """The concatenated documents of one epoch: documents[i] occupies positions [ends[i - 1], ends[i])."""

    documents: Int64[np.ndarray, " documents"]
    ends: Int64[np.ndarray, " documents"]


class Packing:
    """Rows that are windows of `seq_tokens` positions over the concatenated documents.

    A document of n tokens occupies n - 1 positions: position k has token k as its input and token k + 1 as its target.
    The last token (end-of-text) is therefore only a target, and documents of fewer than two tokens are dropped. If a
    window ends inside a document, the rest of the document starts the next row as a separate segment.

        rows = ceil(positions / seq_tokens)        the same in every epoch
        row_id = epoch * rows + row

    Only the last row of an epoch contains padding.

    Args:
      tokens: tokens of all documents.
      offsets: document i is tokens[offsets[i]:offsets[i + 1]].
      documents: indices of the documents to pack.
      seq_tokens: positions per row.
      seed: seed of the order of documents, which changes in each epoch; None keeps the order of `documents`.
    """

    def __init__(
        self,
        tokens: UInt[np.ndarray, " tokens"] | ShardedTokens,
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
        # Two epochs, since a batch may cross their border. Not a decorator, which would keep instances alive.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def batch(self, row_ids: Int64[np.ndarray, " batch"]) -> dict[str, Shaped[np.ndarray, "batch ..."]]:
        """Returns the int32[batch, seq] arrays of rows, and `row_ids`.

        The arrays are tokens; targets, -100 in padding; positions, from 0 in each segment; and segment_ids, from 1 in
        each row and 0 in padding.
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
        """Returns the pieces of documents in a row, in order."""
        epoch, row = divmod(row_id, self.rows)
        order = self._order(epoch)
        start, end = row * self._seq_tokens, min((row + 1) * self._seq_tokens, self.targets)
        # `side="right"`: a position equal to a document's end belongs to the next document.
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
        # Padding gets a valid index here and is masked below.
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
        """Shuffles the documents by sorting random 64-bit integers.

        NumPy keeps raw bit streams stable across versions, but not the results of `permutation`.
        """
        if self._seed is None:
            return _Order(self._documents, np.cumsum(self._places))
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(bits.random_raw(len(self._documents)), kind="stable")
        return _Order(self._documents[order], np.cumsum(self._places[order]))
