"""Best-fit packing of documents into rows, planned once from their lengths."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, Shaped, UInt

from stack_core.abi.data import IGNORED_TARGET
from stack_core.text.packing import best_fit
from stack_train.data.packing import Piece
from stack_train.data.prepared.tokens import ShardedTokens

__all__ = ["BestFitPacking"]


class BestFitPacking:
    """Rows of complete documents; only documents longer than a row are cut, into full rows and a remainder.

    It has the interface of `Packing`, with three differences:
      1. few documents are cut, because a document goes to a row with enough room
      2. every row may end with padding
      3. a row contains the same documents in every epoch; only the order of rows changes

    Args:
      tokens, offsets, documents, seq_tokens: as for `Packing`.
      seed: seed of the shuffle of documents of equal length; None keeps their order.
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
        self._tokens, self._offsets, self._seq_tokens = tokens, offsets, seq_tokens
        if seed is not None:
            # Raw bits, as in `Packing._make_order`: they are stable across NumPy versions.
            bits = np.random.PCG64(np.random.SeedSequence([seed]))
            documents = documents[np.argsort(bits.random_raw(len(documents)), kind="stable")]
        places = np.diff(offsets)[documents] - 1
        # A document of one token lacks a target and yields no piece.
        parts = np.maximum(-(-places // seq_tokens), 0)
        owner = np.repeat(np.arange(len(documents)), parts)
        # The first piece of each document is number 0.
        number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = number * seq_tokens
        lengths = np.minimum(places[owner] - starts, seq_tokens)
        order, self._rows = best_fit(lengths.astype(np.int64), seq_tokens)
        self._documents, self._starts, self._lengths = documents[owner][order], starts[order], lengths[order]
        self.targets = int(lengths.sum())
        self.rows = len(self._rows) - 1

    @property
    def fill(self) -> float:
        """The fraction of positions that are not padding."""
        return self.targets / (self.rows * self._seq_tokens) if self.rows else 0.0

    def batch(self, row_ids: Int64[np.ndarray, " batch"]) -> dict[str, Shaped[np.ndarray, "batch ..."]]:
        """Returns the arrays of rows, as `Packing.batch` does."""
        shape = (len(row_ids), self._seq_tokens)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
        batch["targets"][:] = IGNORED_TARGET
        for place, row_id in enumerate(row_ids.tolist()):
            column = 0
            for segment, piece in enumerate(self.pieces(row_id), start=1):
                first = int(self._offsets[piece.document]) + piece.start_token
                length = piece.end_token - piece.start_token
                at = (place, slice(column, column + length))
                batch["tokens"][at] = self._tokens[first : first + length]
                batch["targets"][at] = self._tokens[first + 1 : first + length + 1]
                batch["positions"][at] = np.arange(length)
                batch["segment_ids"][at] = segment
                column += length
        return batch | {"row_ids": np.asarray(row_ids, np.int64)}

    def pieces(self, row_id: int) -> list[Piece]:
        """Returns the pieces of documents in a row, in order."""
        return list(self._pieces(row_id % self.rows))

    def _pieces(self, row: int) -> Iterator[Piece]:
        for index in range(int(self._rows[row]), int(self._rows[row + 1])):
            start, length = int(self._starts[index]), int(self._lengths[index])
            yield Piece(int(self._documents[index]), start, start + length)
