"""Packing of episodes into shared rows."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Shaped

from stack_core.abi.data import IGNORED_TARGET
from stack_core.text.packing import best_fit, divide_row
from stack_rl.episode_images import IMAGE_COUNTS, PACKED_IMAGES

__all__ = ["PackedRows", "row_counts"]

_PADDING = {"targets": IGNORED_TARGET, "candidates": -1, "experts": -1}


def row_counts(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the numbers of rows below `rows` that packed batches may have, in ascending order.

    They are rows * 3/4, 1/2, 3/8, 1/4, 3/16, ..., each rounded down to a multiple of `parts`. A batch that needs more
    rows than one of them gets the next one, so packing adds few programs and few empty rows.

    Args:
      rows: number of rows without packing, a multiple of `parts`.
      parts: number of equal parts into which devices and microbatches split a batch.
    """
    sizes = (rows * numerator >> shift for shift in range(2, rows.bit_length() + 2) for numerator in (2, 3))
    return tuple(sorted({size // parts * parts for size in sizes} - {0}))


@dataclass(frozen=True)
class PackedRows:
    """A placement of the sequences of a padded batch, which has one sequence per row, in fewer rows.

    Sequence order[i] is in row rows[i], from position starts[i] on; its first segment becomes segment segments[i].

    Attributes:
      order: rows of the padded batch that hold a sequence.
      rows, starts, segments: place of each of these sequences; segments of a row are numbered from 1.
      lengths: number of tokens of each of these sequences.
      shape: numbers of rows, of the packed and the padded batch.
      seq_tokens: number of tokens per row.
    """

    order: Int64[np.ndarray, " sequences"]
    rows: Int64[np.ndarray, " sequences"]
    starts: Int64[np.ndarray, " sequences"]
    segments: Int64[np.ndarray, " sequences"]
    lengths: Int64[np.ndarray, " sequences"]
    shape: tuple[int, int]
    seq_tokens: int

    @classmethod
    def plan(
        cls,
        segment_ids: Shaped[np.ndarray, "rows seq"],
        counts: Sequence[int],
        images: tuple[Int64[np.ndarray, " rows"], int] | None = None,
    ) -> "PackedRows":
        """Plans rows by best-fit decreasing; see `stack_core.text.packing.best_fit`.

        Args:
          segment_ids: at the tokens of each sequence, which begin their row, its segments from 1; 0 in padding.
          counts: numbers of rows that the packed batch may have besides the rows of the padded one.
          images: number of images of each sequence, and the maximum of a row; None without images.
        """
        lengths = np.count_nonzero(segment_ids, axis=1).astype(np.int64)
        there = np.flatnonzero(lengths)
        order, offsets = best_fit(lengths[there], segment_ids.shape[1])
        order, padded = there[order], len(segment_ids)
        of_rows = [order[first:end] for first, end in itertools.pairwise(offsets)]
        if images is not None:
            image_counts, limit = images
            of_rows = [part for row in of_rows for part in divide_row(row, image_counts[row].tolist(), limit)]
        needed = len(of_rows)
        # With one sequence per row, all sequences fit.
        rows = min(count for count in (*counts, padded) if count >= needed)
        before = lambda sizes: np.cumsum(sizes) - sizes
        return cls(
            order=order,
            rows=np.repeat(np.arange(needed), [len(each) for each in of_rows]),
            starts=_joined(before(lengths[each]) for each in of_rows),
            segments=_joined(1 + before(segment_ids[each].max(axis=1).astype(np.int64)) for each in of_rows),
            lengths=lengths[order],
            shape=(rows, padded),
            seq_tokens=segment_ids.shape[1],
        )

    def pack(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a padded batch with its sequences in shared rows.

        In arrays of rows, `real` becomes the number of sequences of a row, and other arrays their mean over the row's
        sequences, so that means weighted by `real` stay the same. Dropped episodes are counted in the first row.
        """
        return {
            name: self._pack_images(array, batch[IMAGE_COUNTS][:, PACKED_IMAGES[name]])
            if name in PACKED_IMAGES
            else self._pack_array(name, array)
            for name, array in batch.items()
        }

    def unpack(self, array: Shaped[np.ndarray, "rows seq"]) -> Shaped[np.ndarray, "padded_rows seq"]:
        """Returns an array of packed rows as an array of the padded batch, with 0 in padding."""
        found = np.zeros((self.shape[1], *array.shape[1:]), array.dtype)
        for sequence, row, start, _, count in self._places():
            found[sequence, :count] = array[row, start : start + count]
        return found

    def _pack_array(self, name: str, array: np.ndarray) -> np.ndarray:
        found = np.full((self.shape[0], *array.shape[1:]), _PADDING.get(name, 0), array.dtype)
        if array.ndim == 1:
            return self._pack_rows(name, array, found)
        if name == IMAGE_COUNTS:
            np.add.at(found, self.rows, array[self.order])
            return found
        for sequence, row, start, segment, count in self._places():
            moved = segment - 1 if name == "segment_ids" else 0
            found[row, start : start + count] = array[sequence, :count] + moved if moved else array[sequence, :count]
        return found

    def _pack_images(
        self, array: Shaped[np.ndarray, "padded_rows entries ..."], counts: Shaped[np.ndarray, " padded_rows"]
    ) -> Shaped[np.ndarray, "rows entries ..."]:
        """Returns the first `counts` entries of each sequence, one sequence after another."""
        found, used = np.zeros((self.shape[0], *array.shape[1:]), array.dtype), np.zeros(self.shape[0], np.int64)
        for sequence, row, *_ in self._places():
            first, end = used[row], used[row] + counts[sequence]
            found[row, first:end] = array[sequence, : counts[sequence]]
            used[row] = end
        return found

    def _pack_rows(self, name: str, array: np.ndarray, found: np.ndarray) -> np.ndarray:
        if name == "share":
            found[:] = 1 / len(found)
        elif name == "padding":
            found[:] = 1 - self.lengths.sum() / (len(found) * self.seq_tokens)
        elif name == "dropped":
            found[0] = array.sum()
        else:
            np.add.at(found, self.rows, array[self.order])
            if name != "real":
                found /= np.maximum(np.bincount(self.rows, minlength=len(found)), 1)
        return found

    def _places(self) -> "zip[tuple[int, int, int, int, int]]":
        columns = self.order, self.rows, self.starts, self.segments, self.lengths
        return zip(*(each.tolist() for each in columns), strict=True)


def _joined(parts: Iterable[Int64[np.ndarray, " part"]]) -> Int64[np.ndarray, " sequences"]:
    return np.concatenate([np.zeros(0, np.int64), *parts])
