"""Best-fit packing of sequences into rows, planned from their lengths."""

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

__all__ = ["best_fit", "divide_row"]


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


def divide_row(
    row: Int64[np.ndarray, " in_row"], sizes: Sequence[int], limit: int
) -> list[Int64[np.ndarray, " in_part"]]:
    """Divides a row into consecutive parts with a total size of at most `limit`.

    Args:
      row: indices of the sequences of a row.
      sizes: size of each sequence, from 0 to `limit`, such as its number of images.
      limit: maximum size of a part.
    """
    parts, used = list[list[int]]([[]]), 0
    for sequence, size in zip(row.tolist(), sizes, strict=True):
        if used + size > limit:
            parts.append([])
            used = 0
        parts[-1].append(sequence)
        used += size
    return [np.asarray(part, np.int64) for part in parts]
