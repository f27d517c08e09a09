"""Batches of numbered rows: an iterator that can be stopped at and resumed, whatever the rows hold."""

from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64, Shaped

from stack_core.abi.config import differences
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError

__all__ = ["Batch", "TrainIterator", "filled", "iterate_rows"]

# Grain computes the number of batches in floating point, which overflows an index for a dataset without end.
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
    """Returns an iterator over batches of rows, each epoch in a new order; batch i depends on (seed, i) only.

    It goes on for 2**48 rows, which no run reaches.

    Args:
      rows: of an epoch; row r in epoch e has the id e * rows + r.
      make_batch: from row ids to arrays that lead with [batch, ...].
      prefetch_batches: batches assembled ahead by a thread; 0 assembles them when they are asked for.
      fingerprint: what the order of batches depends on; saved with each state.
      rows_of_batch: places of a batch that alone are made; None is all. `row_ids` are of all.
    """

    def batch(ids: Int64[np.ndarray, " batch"]) -> Batch:
        own = ids if rows_of_batch is None else ids[rows_of_batch]
        return make_batch(own) | {"row_ids": np.asarray(ids, np.int64)}

    order = int(np.random.SeedSequence([seed]).generate_state(1)[0])
    ids = _RowIds(rows).seed(order).shuffle(seed=order).repeat(1 + _ROWS_OF_A_RUN // rows)
    options = grain.ReadOptions(num_threads=min(1, prefetch_batches), prefetch_buffer_size=prefetch_batches)
    return TrainIterator(iter(ids.batch(batch_size).map(batch).to_iter_dataset(options)), fingerprint)


class _RowIds(grain.MapDataset[np.int64]):
    """Row ids; Grain counts on through the epochs, and the id of row r in epoch e is e * rows + r."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else np.int64(index)


class TrainIterator(grain.DatasetIterator[Batch]):
    """Training batches; its state says which data it belongs to.

    The state is a JSON-compatible dict: {"fingerprint": ..., "batches": how many were taken}.
    """

    def __init__(self, parent: grain.DatasetIterator[Batch], fingerprint: Mapping[str, Any]) -> None:
        super().__init__(parent)
        self._fingerprint = dict(fingerprint)

    def __next__(self) -> Batch:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"fingerprint": dict(self._fingerprint), "batches": self._parent.get_state()["next_index"]}

    def set_state(self, state: Any) -> None:
        """Makes the next batch the one that followed when `state` was taken.

        Raises:
          DataError: the state belongs to other data, or is none of this iterator's.
        """
        self._parent.set_state({"next_index": batches_taken(state, self._fingerprint)})


def batches_taken(state: Any, fingerprint: Mapping[str, Any]) -> int:
    """How many batches an iterator had given when it was saved.

    Raises:
      DataError: the state belongs to other data than `fingerprint` names, or is no such state.
    """
    if not isinstance(state, Mapping) or set(state) != {"fingerprint", "batches"}:
        raise DataError(f"{state!r} is no state of a training iterator. Restore an undamaged checkpoint.")
    if changed := differences(dict(fingerprint), state["fingerprint"]):
        raise DataError(
            "The saved position belongs to other data; here is what it is now, not what it was then:\n  "
            + "\n  ".join(changed)
            + "\nRestore the settings and files of the saved run, or start a new run from its weights."
        )
    return state["batches"]


def filled(values: Shaped[np.ndarray, "rows ..."], rows: int, name: str) -> Shaped[np.ndarray, "batch ..."]:
    """Appends rows of padding up to `rows`; their row ids repeat the last one."""
    missing = rows - len(values)
    if name == "row_ids":
        return np.append(values, np.repeat(values[-1:], missing))
    padding = np.full((missing, *values.shape[1:]), IGNORED_TARGET if name == "targets" else 0, values.dtype)
    return np.concatenate([values, padding])
