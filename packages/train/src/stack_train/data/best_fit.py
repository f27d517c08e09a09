"""Best-fit packing of documents into rows, planned once from their lengths."""

import bisect
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, Shaped, UInt

from stack_core.abi.data import IGNORED_TARGET
from stack_train.data.packing import Piece

__all__ = ["BestFitPacking", "best_fit"]


def best_fit(
    lengths: Int64[np.ndarray, " pieces"], capacity: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " rows_and_1"]]:
    """Packs pieces into rows of `capacity`, longest first, each into the fullest row that has room.

    Args:
      lengths: length of each piece, from 1 to `capacity`; pieces of equal length keep their order.
      capacity: length of a row.

    Returns:
      The indices of the pieces in row order, and the offset of each row: row i is indices[offsets[i]:offsets[i + 1]].

    Source: best-fit decreasing, Johnson, 1973; for training, Ding et al., Fewer Truncations Improve Language Modeling,
    2024 (arXiv:2404.10830).
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by free space
    rooms: list[int] = []  # sorted keys of `with_room`
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(piece)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(row)
    order = np.array([piece for row in rows for piece in row], np.int64)
    return order, np.append(0, np.cumsum([len(row) for row in rows], dtype=np.int64))


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
        tokens: UInt[np.ndarray, " tokens"],
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
