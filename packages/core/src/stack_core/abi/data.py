"""Data: sources of documents, tokenizers, and the batches that a run trains on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import numpy as np

    Batch: TypeAlias = Mapping[str, np.ndarray]
    Shapes: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
else:
    Batch: TypeAlias = Mapping[str, Any]
    Shapes: TypeAlias = Mapping[str, Any]

__all__ = [
    "IGNORED_TARGET",
    "Batch",
    "BatchIterator",
    "Batches",
    "DataConfig",
    "DataSource",
    "Document",
    "FollowsObjective",
    "MeasuresData",
    "Shapes",
    "Tokenizer",
]


IGNORED_TARGET: Final = -100
"""The target of tokens that the loss ignores; the default of `ops.linear_cross_entropy`."""


@runtime_checkable
class DataConfig(Protocol):
    """A config class of the registry `data`, selected by the field `name` of a run's section `data`.

    Attributes:
      name: the name that `data.name` selects.
    """

    name: str

    def spec(self, model: Any) -> Shapes:
        """Returns the shapes and dtypes of a batch over all processes, each [batch, ...]; needs no data.

        Args:
          model: the run's model config.
        """
        ...

    def work(self) -> tuple[str, int]:
        """Returns the maximum content of a batch, for throughput rates: a unit, such as "tokens", and their number."""
        ...

    def check(self, model: Any) -> None:
        """Raises a ConfigError if the section contradicts the model's config."""
        ...

    def build(self, *, seed: int, model: Any) -> Batches:
        """Loads the data.

        Args:
          seed: seed of the order of examples.
          model: the run's model config.

        Raises:
          StackError: the data cannot be used; names it and a remedy.
        """
        ...


@runtime_checkable
class FollowsObjective(Protocol):
    """A config class of the registry `data` whose batches depend on the run's objective, such as rollouts."""

    def for_objective(self, objective: Any) -> DataConfig:
        """Returns the config of the batches for an objective, which is the config of the section `objective`.

        Raises:
          ConfigError: the objective cannot be trained on this data.
        """
        ...


@runtime_checkable
class BatchIterator(Protocol):
    """An iterator whose order is a pure function of the data, the seed and the number of batches consumed."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the iterator, as JSON."""
        ...

    def set_state(self, state: Any) -> None:
        """Restores a position from `get_state`; the next batch is the same as after the original call.

        Raises:
          DataError: the state belongs to other data.
        """
        ...


@runtime_checkable
class MeasuresData(Protocol):
    """A `BatchIterator` with metrics of its own, such as the shares of a mixture."""

    def data_metrics(self) -> Mapping[str, float]:
        """Returns metrics of the last batch; called after each batch, they join the metrics of its step."""
        ...


class Batches(ABC):
    """The data of a run. Every method but `train_iterator` has a default that does nothing.

    A batch may hold `row_ids`, int64[batch], besides the arrays of `DataConfig.spec`; they stay on the host.
    """

    @abstractmethod
    def train_iterator(self) -> BatchIterator:
        """Returns an iterator over training batches, from the first one."""

    def validation_batches(self) -> Iterator[Batch]:
        """Iterates over all validation batches, the same at each call."""
        return iter(())

    def describe_rows(self, row_ids: np.ndarray) -> Sequence[str]:
        """Names the examples of each row for an error message.

        Args:
          row_ids: int64[rows], from one batch.
        """
        return ()

    def with_rows(self, rows: np.ndarray) -> Batches | None:
        """Returns data whose training batches contain only these rows; None for data that always makes full batches.

        A run in several processes calls it once. `row_ids`, the state of the iterator and validation batches still
        describe full batches, so a run may resume with another number of processes.

        Args:
          rows: int64[own], ascending places in a batch.
        """
        return None

    def split_rows(self, parts: int) -> Sequence[int]:
        """Takes the number of equal parts into which devices and microbatches split each batch.

        A run calls it once, before `train_iterator`.

        Returns:
          Numbers of rows that training batches may have besides the rows of `DataConfig.spec`, each smaller and a
          multiple of `parts`. The first batch with each number compiles another program. Empty if all batches have the
          rows of the spec.
        """
        return ()

    def write(self, directory: Path) -> None:  # noqa: B027  optional
        """Writes files that belong to the run, such as the tokenizer, each atomically. Existing files stay."""

    def checkpoint_saved(self, step: int, steps: Sequence[int]) -> None:  # noqa: B027
        """Releases resources that only a resume from an earlier checkpoint would need.

        Args:
          step: step of a checkpoint that is complete on disk, with the iterator's state.
          steps: steps of all checkpoints, oldest first; a run cannot resume from before the first.
        """

    def close(self) -> None:  # noqa: B027
        """Stops background work. Called once when the run ends, also after an error."""


@dataclass(frozen=True)
class Document:
    """One text of a corpus; `name` is its origin for people: a path, or "path:line"."""

    name: str
    text: str


@runtime_checkable
class DataSource(Protocol):
    """A corpus that can be read repeatedly in the same order."""

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str:
        """Returns a value that changes whenever the documents change; much cheaper than reading them all."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """A bidirectional mapping between text and token ids.

    Attributes:
      vocab_size: number of tokens.
      eos_id: id of the token that ends a text, or None.
      bos_id: id of the token that begins a text, or None.
    """

    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Encodes a prompt; names of special tokens in `text` become those tokens.

        Args:
          add_special_tokens: whether to add the tokens that the tokenizer puts before a text, such as BOS. EOS is
            never added, since an answer follows the prompt.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of one token within a text, possibly only a part of a character.

        Returns the name of a special token, and b"" for an id without a token.
        """
        ...

    def save(self, directory: Path) -> None: ...
