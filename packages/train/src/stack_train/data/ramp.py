"""Data whose first training batches are divided into smaller ones.

A stage with k batches for each batch of the data takes every k-th row. Each device and each process then has its share
of the small batches, which are the same on any mesh and in any number of processes.

Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv:1812.06162), whose critical batch
size grows during training; Megatron-LM's `rampup_batch_size`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Batch, Batches, BatchIterator, MeasuresData, Shapes
from stack_core.abi.errors import ConfigError, DataError, ShardingError
from stack_train.data.abilities import VariesShapes

__all__ = ["RampStage", "RampedBatches", "check_ramp"]


@config
class RampStage:
    """First steps of a run, or the steps after an earlier stage, with smaller batches.

    Attributes:
      rows: rows of each batch, over all processes.
      steps: number of steps.
    """

    rows: PositiveInt
    steps: PositiveInt


def check_ramp(stages: Sequence[RampStage], batch_size: int, parts: int = 1) -> None:
    """Checks that the stages of `run.ramp` divide batches of the data into whole smaller ones.

    Args:
      stages: the stages.
      batch_size: rows of a batch of the data, over all processes.
      parts: number of equal parts into which devices and microbatches split each batch.

    Raises:
      ConfigError: they do not; names the key and a remedy.
      ShardingError: they do, but not for this number of devices. A range of hosts then uses another number.
    """
    for number, stage in enumerate(stages):
        where = f"run.ramp[{number}]"
        if stage.rows >= batch_size or batch_size % stage.rows:
            raise ConfigError(
                f"{where}.rows is {stage.rows}, and data.batch_size is {batch_size}. Give a smaller number that "
                "divides it."
            )
        if stage.rows % parts:
            raise ShardingError(
                f"{where}.rows is {stage.rows}, and devices and microbatches split each batch into {parts} equal "
                f"parts. Give a multiple of {parts}, or change mesh or run.accumulation_steps."
            )
        share = batch_size // stage.rows
        if stage.steps % share:
            before = stage.steps // share * share
            choices = [str(steps) for steps in (before, before + share) if steps]
            raise ConfigError(
                f"{where}.steps is {stage.steps}, which ends inside a batch of the data: {share} steps of {stage.rows} "
                f"rows take one of {batch_size}. Give {' or '.join(choices)} steps."
            )


class RampedBatches(Batches):
    """Data whose training batches have the rows of the stages first, then `batch_size` rows."""

    def __init__(
        self,
        data: Batches,
        stages: Sequence[RampStage],
        batch_size: int,
        rows: Int64[np.ndarray, " own"] | None = None,
    ) -> None:
        """Divides the first batches of `data`.

        Args:
          data: data with batches of `batch_size` rows.
          stages: stages that `check_ramp` accepts.
          batch_size: rows of a batch of the data, over all processes.
          rows: places of the rows that the arrays of `data` hold; None if they hold all rows.
        """
        self._data, self._stages, self._batch_size = data, stages, batch_size
        self._rows = np.arange(batch_size) if rows is None else rows

    def train_iterator(self) -> BatchIterator:
        batches = self._data.train_iterator()
        kind = _MeasuredIterator if isinstance(batches, MeasuresData) else _RampedIterator
        return kind(batches, [(stage.steps, self._batch_size // stage.rows) for stage in self._stages], self._rows)

    def split_rows(self, parts: int) -> Sequence[int]:
        return sorted({*self._data.split_rows(parts), *(stage.rows for stage in self._stages)})

    @property
    def batch_shapes(self) -> Sequence[Shapes]:
        """See `VariesShapes`."""
        return self._data.batch_shapes if isinstance(self._data, VariesShapes) else ()

    def with_rows(self, rows: Int64[np.ndarray, " own"]) -> "RampedBatches | None":
        of_process = self._data.with_rows(rows)
        return None if of_process is None else RampedBatches(of_process, self._stages, self._batch_size, rows)

    def validation_batches(self) -> Iterator[Batch]:
        return self._data.validation_batches()

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> Sequence[str]:
        return self._data.describe_rows(row_ids)

    def write(self, directory: Any) -> None:
        self._data.write(directory)

    def checkpoint_saved(self, step: int, steps: Sequence[int]) -> None:
        self._data.checkpoint_saved(step, steps)

    def close(self) -> None:
        self._data.close()


class _RampedIterator:
    """Iterator over the parts of batches; `stages` has the steps and the parts of a batch of each stage."""

    def __init__(
        self, batches: BatchIterator, stages: Sequence[tuple[int, int]], rows: Int64[np.ndarray, " own"]
    ) -> None:
        self._batches, self._stages, self._rows = batches, stages, rows
        self._step = 0
        self._batch: Batch | None = None  # with parts that were not yielded
        self._before = batches.get_state()  # before `_batch`, or before the next one

    def __iter__(self) -> "_RampedIterator":
        return self

    def __next__(self) -> Batch:
        part, parts = self._place()
        if self._batch is None:
            self._batch = next(self._batches)
        batch, own = self._batch, self._rows % parts == part
        if parts > 1:  # `row_ids` lists the rows of all processes
            batch = {name: array[part::parts] if name == "row_ids" else array[own] for name, array in batch.items()}
        self._step += 1
        if part == parts - 1:
            self._batch, self._before = None, self._batches.get_state()
        return batch

    def get_state(self) -> dict[str, Any]:
        part, parts = self._place()
        return {"batches": self._before, "step": self._step, "part": [part, parts] if part else [0, 1]}

    def set_state(self, state: Any) -> None:
        if not isinstance(state, dict) or state.keys() != {"batches", "step", "part"}:
            raise DataError("The position in the data is one without run.ramp. Leave run.ramp out, or begin a new run.")
        self._batches.set_state(state["batches"])
        self._step, self._batch, self._before = state["step"], None, state["batches"]
        part, parts = self._place()
        if state["part"] != ([part, parts] if part else [0, 1]):
            raise DataError(
                f"Step {self._step} of the run ended inside a batch of the data, after {state['part'][0]} of "
                f"{state['part'][1]} parts, and with this run.ramp it does not. Resume with the stages of the run."
            )
        if part:
            self._batch = next(self._batches)

    def _place(self) -> tuple[int, int]:
        """Returns the next part of a batch, and the number of its parts."""
        step = self._step
        for steps, parts in self._stages:
            if step < steps:
                return step % parts, parts
            step -= steps
        return 0, 1


class _MeasuredIterator(_RampedIterator):
    _batches: Any

    def data_metrics(self) -> Any:
        return self._batches.data_metrics()
