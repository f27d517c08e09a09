"""Mixtures of several sources: rows of each source in proportion to its weight."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int64

from stack_core.abi.errors import ConfigError
from stack_train.data.process_rows import ProcessRows
from stack_train.data.rows import Batch, TrainIterator, iterate_batches, row_order
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

__all__ = ["MixedBatches", "MixedIterator", "Selection", "Source"]

_PERIOD = 1 << 20
# Every position below is less than 2**48, which keeps all products below 2**63.
_BATCHES_OF_A_RUN = 1 << 40


@runtime_checkable
class Source(Protocol):
    """Rows of one source of a mixture.

    Attributes:
      tokenizer: tokenizer of the source, the same for all sources.
      train_rows: number of rows in one epoch.
      fingerprint: settings and digests that determine the rows.
    """

    tokenizer: HuggingFaceTokenizer
    fingerprint: dict[str, Any]

    @property
    def train_rows(self) -> int: ...

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> Batch: ...

    def validation_batches(self) -> Iterator[Batch]: ...

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> Sequence[str]: ...


class Selection:
    """Interleaving of sources in fixed proportions, as a pure function of the position in the mixture.

        |counts(n)[s] - n parts[s] / 2**20| < number of sources, for every n

    Sources are selected by nested floors: the first source has k - floor(k (1 - p_0)) of the first k rows, and the rest
    is divided among the remaining sources in the same way. Grain's `mix` does the same, but its parts are rounded to
    about a hundredth of the smallest weight.

    Args:
      weights: positive weight of each source, by name.

    Raises:
      ConfigError: a weight is less than a millionth of their sum.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        shares = np.asarray(list(weights.values()), np.float64) / sum(weights.values())
        # Largest remainders: the parts sum to the period, and each is within 1 of its exact value.
        parts = np.floor(shares * _PERIOD).astype(np.int64)
        parts[np.argsort(parts - shares * _PERIOD, kind="stable")[: _PERIOD - parts.sum()]] += 1
        if not parts.all():
            name = list(weights)[int(parts.argmin())]
            raise ConfigError(
                f"data.mix.{name}.weight is {weights[name]}, less than a millionth of the sum of all weights. Raise "
                f"it, or remove {name!r}."
            )
        self.parts = parts

    def counts(self, rows: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n sources"]:
        """Returns the number of rows of each source among the first `rows` rows of the mixture."""
        periods, left = np.divmod(rows, _PERIOD)
        remaining = _PERIOD
        found: list[np.ndarray] = []
        for part in self.parts.tolist():
            kept = left * (remaining - part) // remaining
            found.append(periods * part + left - kept)
            left, remaining = kept, max(remaining - part, 1)
        return np.stack(found, axis=-1)

    def select(self, rows: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the source of each row of the mixture, and the row's position within that source."""
        before = self.counts(rows)
        sources = (self.counts(rows + 1) > before).argmax(axis=-1)
        return sources, before[np.arange(len(rows)), sources]


class MixedBatches(ProcessRows):
    """Batches of rows of several sources, each row of one source.

    Each source has its own epochs: it starts again, in another order, when its rows are used up. Row `row` of source s
    has the row id `row * sources + s`.

    Attributes:
      tokenizer: tokenizer of all sources.
      sources: sources by name.
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        *,
        seed: int,
        batch_size: int,
        prefetch_batches: int,
    ) -> None:
        self.sources = dict(sources)
        self.selection = Selection(weights)
        self.tokenizer = next(iter(sources.values())).tokenizer
        self._list = list(sources.values())
        self._seed, self._batch_size, self._prefetch_batches = seed, batch_size, prefetch_batches
        self.fingerprint = {
            f"{name}: {key}": value for name, source in sources.items() for key, value in source.fingerprint.items()
        } | {"the shares of data.mix (2**-20)": self.selection.parts.tolist()}

    def train_iterator(self) -> "MixedIterator":
        """Returns an iterator over training batches; batch i depends only on (seed, i)."""
        ids = _BatchIds(self._list, self.selection, self._seed, self._batch_size)
        iterator = iterate_batches(
            ids,
            self.train_batch,
            prefetch_batches=self._prefetch_batches,
            rows_of_batch=self.rows,
        )
        return MixedIterator(iterator, self.fingerprint, self)

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> Batch:
        """Returns the arrays of rows."""
        rows, sources = np.divmod(row_ids, len(self._list))
        batch: Batch = {}
        for number in np.unique(sources).tolist():
            is_own = sources == number
            for name, values in self._list[number].train_batch(rows[is_own]).items():
                if name not in batch:
                    batch[name] = np.empty((len(row_ids), *values.shape[1:]), values.dtype)
                batch[name][is_own] = values
        return batch | {"row_ids": row_ids}

    def validation_batches(self) -> Iterator[Batch]:
        """Yields the held-out rows of every source once, regardless of the weights."""
        for number, source in enumerate(self._list):
            for batch in source.validation_batches():
                # Row ids are -1 - row.
                yield batch | {"row_ids": -1 - ((-1 - batch["row_ids"]) * len(self._list) + number)}

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the source and the documents of each row."""
        names = list(self.sources)
        found: list[str] = []
        for row_id in map(int, row_ids):
            row, number = divmod(row_id if row_id >= 0 else -1 - row_id, len(names))
            (text,) = self._list[number].describe_rows(np.asarray([row if row_id >= 0 else -1 - row]))
            found.append(f"{names[number]}: {text}")
        return found

    def metrics(self, batches: int) -> dict[str, float]:
        """Returns each source's share of the rows of the first `batches` batches, and the epochs of it that they are.

        The names are "NAME_share" and "NAME_epochs".
        """
        rows = batches * self._batch_size
        counts = self.selection.counts(np.asarray([rows]))[0].tolist()
        found = zip(self.sources.items(), counts, strict=True)
        return {
            key: value
            for (name, source), count in found
            for key, value in ((f"{name}_share", count / rows), (f"{name}_epochs", count / source.train_rows))
        }

    def write(self, directory: Path) -> None:
        """Writes the tokenizer under `tokenizer/` unless that exists."""
        write_tokenizer(self.tokenizer, directory)


class MixedIterator(TrainIterator):
    """Iterator over the batches of a mixture, with the shares and epochs of its sources."""

    def __init__(
        self, parent: grain.DatasetIterator[Batch], fingerprint: Mapping[str, Any], mixed: MixedBatches
    ) -> None:
        super().__init__(parent, fingerprint)
        self._mixed = mixed

    def data_metrics(self) -> Mapping[str, float]:
        """Returns the shares and epochs of the sources, up to the last batch yielded."""
        return self._mixed.metrics(self.get_state()["batches"])


class _BatchIds(grain.MapDataset[np.ndarray]):
    """Row ids of each batch of a mixture."""

    def __init__(self, sources: Sequence[Source], selection: Selection, seed: int, batch_size: int) -> None:
        super().__init__()
        self._selection, self._batch_size = selection, batch_size
        # Each source has its own order, which sources added behind it do not change.
        self._orders = [
            row_order(source.train_rows, int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))
            for number, source in enumerate(sources)
        ]

    def __len__(self) -> int:
        return _BATCHES_OF_A_RUN // self._batch_size

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._ids(int(index))

    def _ids(self, batch: int) -> Int64[np.ndarray, " batch"]:
        places = np.arange(batch * self._batch_size, (batch + 1) * self._batch_size)
        pairs = zip(*(each.tolist() for each in self._selection.select(places)), strict=True)
        count = len(self._orders)
        return np.asarray([self._orders[source][position] * count + source for source, position in pairs], np.int64)
