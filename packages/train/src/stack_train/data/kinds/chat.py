"""`data.name: chat`: conversations for supervised fine-tuning on the assistant's tokens."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Int64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.cache import digest_of
from stack_train.data.conversations import Conversation, Tokenization
from stack_train.data.examples import TooLong, fitting, laid_out, plan_rows, stacked
from stack_train.data.files import expand_glob, read_text
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.text import check_positions, check_vocabulary, language_model_shapes
from stack_train.data.process_rows import ProcessRows
from stack_train.data.settings import MixedSource, check_mix
from stack_train.data.split import split_documents, text_digest
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

if TYPE_CHECKING:
    from stack_train.data.mixture import MixedBatches
    from stack_train.data.rows import Batch, TrainIterator

__all__ = ["ChatBatches", "ChatData", "load_tokenizer"]


@config
class ChatData:
    """Conversations in JSONL files, one record per line: `messages`, or `prompt` and `completion`.

    A message has a `role` and a `content`; a prompt or completion is a text or a list of messages. The loss covers only
    the assistant's tokens, including the token that ends its turn; for a prompt and completion, only the completion's
    tokens. The chat template also receives a record's `tools` and `chat_template_kwargs`.

    Attributes:
      source: glob of JSONL files, such as "chats/*.jsonl"; required unless `mix` is set.
      name: selects this kind of data.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      chat_template: file with the Jinja source of a chat template; None uses the tokenizer's template.
      seq_tokens: tokens per row.
      packed: True packs several conversations into a row, as segments that do not attend to each other.
      too_long: policy for conversations longer than a row: "error", "drop", or "cut", which keeps the beginning.
      batch_size: rows per batch, over all processes.
      validation_fraction: fraction of the conversations held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
      mix: globs of JSONL files by name, with weights, in place of `source`. Each row has conversations of one source.
    """

    source: str | None = None
    name: Literal["chat"] = "chat"
    tokenizer: str | None = None
    chat_template: str | None = None
    seq_tokens: PositiveInt = 512
    packed: bool = True
    too_long: TooLong = "error"
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2
    mix: Mapping[str, MixedSource] = Field(default_factory=dict)

    def spec(self, model: Any) -> Shapes:
        return language_model_shapes(self.batch_size, self.seq_tokens)

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * self.seq_tokens

    def check(self, model: Any) -> None:
        check_positions(self.seq_tokens, model)
        if self.mix:
            fields = {f"data.mix.{name}.text_field": each.text_field for name, each in self.mix.items()}
            given = {"data.source": self.source, **fields}
            check_mix(self.mix, {key: value for key, value in given.items() if value is not None})
        elif self.source is None:
            raise ConfigError("data.source is not set. Set it to a glob of JSONL files, or set data.mix to several.")

    def build(self, *, seed: int, model: Any) -> "ChatBatches | MixedBatches":
        """Reads and tokenizes every conversation.

        Raises:
          ConfigError: no tokenizer is configured, or its vocabulary is larger than the model's.
          DataError: a record is malformed or too long, or the training split is empty.
          ChatTemplateError: the template rejects a conversation.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, self.chat_template)
        check_vocabulary(tokenizer.vocab_size, model)
        tokenization = Tokenization.by_template_of(tokenizer)
        if not self.mix:
            return self._batches(str(self.source), tokenizer, tokenization, seed)
        from stack_train.data.mixture import MixedBatches  # imports Grain, which only a run needs

        return MixedBatches(
            {name: self._batches(each.source, tokenizer, tokenization, seed) for name, each in self.mix.items()},
            {name: each.weight for name, each in self.mix.items()},
            seed=seed,
            batch_size=self.batch_size,
            prefetch_batches=self.prefetch_batches,
        )

    def _batches(
        self, source: str, tokenizer: HuggingFaceTokenizer, tokenization: Tokenization, seed: int
    ) -> "ChatBatches":
        records = jsonl_records(expand_glob(source, self.name))
        conversations = [tokenization.conversation(name, record) for name, record in records]
        if not conversations:
            raise DataError(f"{source} holds no conversation. Point data.source at files with some.")
        return ChatBatches(self, tokenizer, fitting(conversations, self.seq_tokens, self.too_long), seed=seed)


class ChatBatches(ProcessRows):
    """Batches of conversations; see `Batches`.

    Attributes:
      tokenizer: tokenizer of the conversations.
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.
    """

    def __init__(
        self, config: ChatData, tokenizer: HuggingFaceTokenizer, conversations: Sequence[Conversation], *, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self._config, self._conversations, self._seed = config, conversations, seed
        digests = np.asarray([text_digest(each.identity) for each in conversations], np.uint64)
        training, validation = split_documents(digests, config.validation_fraction)
        # The split orders by digest; sorting restores the order of the files.
        self._training, self._validation = self._plan(np.sort(training)), self._plan(np.sort(validation))
        self.fingerprint = {
            "seed": seed,
            "data.seq_tokens": config.seq_tokens,
            "data.batch_size": config.batch_size,
            "data.packed": config.packed,
            "data.validation_fraction": config.validation_fraction,
            "the conversations (digest)": digest_of([int(digest) for digest in digests]),
        }

    @property
    def train_rows(self) -> int:
        """Number of rows in one epoch."""
        return len(self._training)

    def train_iterator(self) -> "TrainIterator":
        from stack_train.data.rows import iterate_rows  # imports Grain, which only a run needs

        return iterate_rows(
            self.train_rows,
            self.train_batch,
            seed=self._seed,
            batch_size=self._config.batch_size,
            prefetch_batches=self._config.prefetch_batches,
            fingerprint=self.fingerprint,
            rows_of_batch=self.rows,
        )

    def validation_batches(self) -> "Iterator[Batch]":
        """Yields all held-out rows once; the last batch is filled with padding. Held-out row r has row id -1 - r."""
        from stack_train.data.rows import filled

        size = self._config.batch_size
        for first in range(0, len(self._validation), size):
            rows = np.arange(first, min(first + size, len(self._validation)))
            batch = self._rows(self._validation, rows) | {"row_ids": -1 - rows}
            yield {name: filled(values, size, name) for name, values in batch.items()}

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the conversations of each row."""
        found = (
            self._training[row_id % len(self._training)] if row_id >= 0 else self._validation[-1 - row_id]
            for row_id in map(int, row_ids)
        )
        return ["; ".join(self._conversations[index].name for index in row) for row in found]

    def write(self, directory: Path) -> None:
        write_tokenizer(self.tokenizer, directory)

    def _plan(self, chosen: Int64[np.ndarray, " chosen"]) -> list[Int64[np.ndarray, " in_row"]]:
        # A conversation of n tokens has n - 1 inputs.
        lengths = np.asarray([len(self._conversations[index].tokens) - 1 for index in chosen], np.int64)
        return [chosen[row] for row in plan_rows(lengths, self._config.seq_tokens, packed=self._config.packed)]

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> "Batch":
        """Returns the arrays of training rows."""
        return self._rows(self._training, row_ids % len(self._training))

    def _rows(self, plan: Sequence[Any], rows: Int64[np.ndarray, " batch"]) -> "Batch":
        examples = ([self._conversations[index] for index in plan[row]] for row in rows)
        return stacked([laid_out(each, self._config.seq_tokens) for each in examples])

    @cached_property
    def supervised_tokens(self) -> int:
        """Number of supervised targets in one epoch."""
        indices = np.concatenate(self._training)
        return sum(int(self._conversations[index].supervised[1:].sum()) for index in indices)


def load_tokenizer(path: str | None, kind: str, chat_template: str | None) -> HuggingFaceTokenizer:
    """Loads the tokenizer of a data config.

    Args:
      path: directory of the tokenizer, or its `tokenizer.json`.
      kind: kind of data, for messages.
      chat_template: file with the Jinja source of a chat template; None keeps the tokenizer's template.

    Raises:
      ConfigError: `path` is None.
      DataError: the tokenizer or the template cannot be read.
    """
    if path is None:
        raise ConfigError(
            f"Data of kind {kind!r} needs a tokenizer: set data.tokenizer to a directory with tokenizer.json, or start "
            "from a run that has one, by run.init_from."
        )
    tokenizer = HuggingFaceTokenizer.load(path)
    if chat_template is None:
        return tokenizer
    return tokenizer.with_chat_template(read_text(Path(chat_template).expanduser()))
