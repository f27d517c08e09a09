"""A resumable iterator over batches of numbered rows."""

from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64, Shaped

from stack_core.abi.config import differences
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError

__all__ = ["Batch", "TrainIterator", "filled", "iterate_batches", "iterate_rows", "row_order"]

# Grain computes the number of batches in floating point, which overflows an index if the dataset is infinite.
_ROWS_OF_A_RUN = 1 << 48

Batch = dict[str, np.ndarray]


def iterate_rows(
    rows: int,
    make_batch: Callable[[Int64[np.ndarray, " batch"]], Batch],
    *,
    seed: int,
    batch_size: int,
    prefetch_batches: int,
    fingerprint: Mapping[str, Any],
    rows_of_batch: Int64[np.ndarray, " own"] | None = None,
) -> "TrainIterator":
    """Returns an iterator over batches of rows, shuffled in each epoch; batch i depends only on (seed, i).

    The iterator yields at least 2**48 rows, which no run reaches.

    Args:
      rows: number of rows in an epoch; row r of epoch e has the id e * rows + r.
      make_batch: function from row ids to arrays [batch, ...].
      seed: seed of the order of rows.
      batch_size: number of rows in a batch.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles each batch on request.
      fingerprint: settings and digests that determine the order of batches; saved with each state.
      rows_of_batch: indices within a batch of the rows to make, such as one process's share; None makes all rows.
        `row_ids` always covers the complete batch.
    """
    # Grain only takes seeds of 32 bits.
    order = int(np.random.SeedSequence([seed]).generate_state(1)[0])
    ids = row_order(rows, order).batch(batch_size)
    batches = iterate_batches(ids, make_batch, prefetch_batches=prefetch_batches, rows_of_batch=rows_of_batch)
    return TrainIterator(batches, fingerprint)


def row_order(rows: int, seed: int) -> grain.MapDataset[np.int64]:
    """Returns the ids of rows over many epochs, each in another order; see `iterate_rows`.

    Args:
      rows: number of rows in an epoch.
      seed: seed of 32 bits.
    """
    return _RowIds(rows).seed(seed).shuffle(seed=seed).repeat(1 + _ROWS_OF_A_RUN // rows)


def iterate_batches(
    ids: grain.MapDataset[Any],
    make_batch: Callable[[Int64[np.ndarray, " batch"]], Batch],
    *,
    prefetch_batches: int,
    rows_of_batch: Int64[np.ndarray, " own"] | None = None,
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over batches whose row ids are the elements of a dataset; see `iterate_rows`."""

    def batch(ids: Int64[np.ndarray, " batch"]) -> Batch:
        own = ids if rows_of_batch is None else ids[rows_of_batch]
        return make_batch(own) | {"row_ids": np.asarray(ids, np.int64)}

    options = grain.ReadOptions(num_threads=min(1, prefetch_batches), prefetch_buffer_size=prefetch_batches)
    return iter(ids.map(batch).to_iter_dataset(options))


class _RowIds(grain.MapDataset[np.int64]):
    """Row ids. Grain's index keeps counting across epochs, so row r of epoch e has the id e * rows + r."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else np.int64(index)


class TrainIterator(grain.DatasetIterator[Batch]):
    """Iterator over training batches, whose state identifies the data.

    The state is a JSON-compatible dict: {"fingerprint": ..., "batches": number of batches yielded}.
    """

    def __init__(self, parent: grain.DatasetIterator[Batch], fingerprint: Mapping[str, Any]) -> None:
        super().__init__(parent)
        self._fingerprint = dict(fingerprint)

    def __next__(self) -> Batch:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"fingerprint": dict(self._fingerprint), "batches": self._parent.get_state()["next_index"]}

    def set_state(self, state: Any) -> None:
        """Resumes at the batch that followed `state`.

        Raises:
          DataError: the state belongs to other data, or is malformed.
        """
        self._parent.set_state({"next_index": saved_position(state, self._fingerprint)})


def saved_position(state: Any, fingerprint: Mapping[str, Any]) -> int:
    """Returns the number of batches that an iterator had yielded when its state was saved.

    Raises:
      DataError: the state's fingerprint differs from `fingerprint`, or the state is malformed.
    """
    if not isinstance(state, Mapping) or set(state) != {"fingerprint", "batches"}:
        raise DataError(f"{state!r} is not the state of a training iterator. Restore an undamaged checkpoint.")
    if changed := differences(dict(fingerprint), state["fingerprint"]):
        raise DataError(
            "The saved position belongs to different data. Differences (current, not saved):\n  "
            + "\n  ".join(changed)
            + "\nRestore the settings and files of the saved run, or start a new run from its weights."
        )
    return state["batches"]


def filled(values: Shaped[np.ndarray, "rows ..."], rows: int, name: str) -> Shaped[np.ndarray, "batch ..."]:
    """Pads an array to `rows` rows: targets with -100, row ids with the last id, other arrays with 0."""
    missing = rows - len(values)
    if name == "row_ids":
        # `describe_rows` must be able to resolve every id of a batch.
        return np.append(values, np.repeat(values[-1:], missing))
    padding = np.full((missing, *values.shape[1:]), IGNORED_TARGET if name == "targets" else 0, values.dtype)
    return np.concatenate([values, padding])
