"""Data: sources of documents, tokenizers, and the batches that a run trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "Closes",
    "DataKind",
    "DataSource",
    "Describes",
    "Document",
    "FollowsCheckpoints",
    "PolicyBatches",
    "ReadsRows",
    "Shapes",
    "TakesTrained",
    "Tokenizer",
    "Tokenizes",
    "Validates",
    "WritesFiles",
]


IGNORED_TARGET: Final = -100
"""The target of a token that a loss leaves out; the default of `ops.linear_cross_entropy`."""


@runtime_checkable
class DataKind(Protocol):
    """A config class of the registry `batches`: what the section `data` of a run says, by its field `kind`.

    Attributes:
      kind: the name that `data.kind` selects.
    """

    kind: str

    def spec(self, model: Any) -> Shapes:
        """The arrays of a batch, over all processes; each leads with [batch, ...]. Known before any data is read.

        Args:
          model: the run's model config.
        """
        ...

    def work(self) -> tuple[str, int]:
        """What a batch holds at most, for rates: a unit, such as "tokens", and how many of them."""
        ...

    def check(self, model: Any) -> None:
        """Raises a ConfigError where the section and the model's config contradict each other."""
        ...

    def build(self, *, seed: int, model: Any) -> Batches:
        """Reads what there is to read.

        Args:
          seed: of the order of examples.
          model: the run's model config.

        Raises:
          StackError: the data cannot be used; names it, and what to do.
        """
        ...


@runtime_checkable
class BatchIterator(Protocol):
    """Batches whose order is a pure function of the data, the seed and the number of batches taken."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, as JSON."""
        ...

    def set_state(self, state: Any) -> None:
        """Makes the next batch the one that followed when `state` was taken.

        Raises:
          DataError: the state belongs to other data.
        """
        ...


@runtime_checkable
class Batches(Protocol):
    """The data of a run.

    A batch may hold `row_ids`, int64[batch], besides what `DataKind.spec` says; they stay on the host, and `Describes`
    names the examples of each. What else data can do are the small protocols below, asked by `isinstance`.
    """

    def train_iterator(self) -> BatchIterator: ...


@runtime_checkable
class Validates(Protocol):
    """Data of which some is held out."""

    def validation_batches(self) -> Iterator[Batch]:
        """All held-out batches, the same at each call; none where nothing is held out."""
        ...


@runtime_checkable
class Describes(Protocol):
    """Data that can say where its rows come from."""

    def describe_rows(self, row_ids: Any) -> list[str]:
        """Names the examples of each row, for the message of an error."""
        ...


@runtime_checkable
class Tokenizes(Protocol):
    """Data that is made of text."""

    tokenizer: Tokenizer


@runtime_checkable
class WritesFiles(Protocol):
    """Data that leaves files beside the model, such as its tokenizer."""

    def write(self, directory: Path) -> None:
        """Writes files into the run's directory, each whole or not at all; what is there already stays."""
        ...


@runtime_checkable
class PolicyBatches(Batches, Protocol):
    """Data that the policy makes: the run's loop hands over the new weights after each step."""

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Any]) -> None:
        """Takes the weights that later batches are to be drawn from.

        Args:
          params: all variables of the model; valid until the next step begins, which donates them.
          version: steps done.
          score: `score(params, batch)`, see `Trainer`.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """Data that works beside the run."""

    def close(self) -> None:
        """Ends what is under way; called once when the run ends, however it does."""
        ...


@runtime_checkable
class FollowsCheckpoints(Protocol):
    """Data that holds something until a checkpoint has used it."""

    def checkpoint_saved(self, step: int, kept: Sequence[int]) -> None:
        """Learns that a checkpoint is whole on disk, so that the iterator's state in it may be gone back to.

        Args:
          step: of the checkpoint.
          kept: the steps of all checkpoints that there are, oldest first; nothing before the first can be gone back to.
        """
        ...


@runtime_checkable
class TakesTrained(PolicyBatches, Protocol):
    """Data whose `update_weights` may take what the run trains alone, such as an adapter, and not the frozen rest.

    Attributes:
      takes_trained: whether it does; `score` takes the same parameters.
    """

    @property
    def takes_trained(self) -> bool: ...


@runtime_checkable
class ReadsRows(Batches, Protocol):
    """Data that can make some rows of each batch alone, those on the devices of one of several processes.

    Of other data each process makes whole batches and leaves out what it does not hold.
    """

    def with_rows(self, rows: np.ndarray) -> Batches:
        """The same data, whose training batches hold these rows alone; all else is as before.

        `row_ids` are of the whole batch still, and so is the state of the iterator: it does not depend on the rows.

        Args:
          rows: int64[own], places in a batch, in rising order.
        """
        ...


@dataclass(frozen=True)
class Document:
    """One text of a corpus; `name` tells a person where it came from: a path, or "path:line"."""

    name: str
    text: str


@runtime_checkable
class DataSource(Protocol):
    """A corpus that can be read again and again in the same order."""

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str:
        """Changes whenever the documents do; cheap beside reading them all."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Encodes a prompt; the names of special tokens in `text` become those tokens.

        Args:
          add_special_tokens: also add the tokens that the tokenizer puts before a text, such as one for its beginning.
            None that ends a text is added, because an answer is to follow.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that one token stands for within a text, which may be a part of a character.

        Of a special token it is the name, and b"" of an id that is no token.
        """
        ...

    def save(self, directory: Path) -> None: ...
