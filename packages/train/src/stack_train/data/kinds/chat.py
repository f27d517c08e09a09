"""`data.name: chat`: conversations for supervised fine-tuning on the assistant's tokens."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Int64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.conversations import Conversation, Tokenization
from stack_train.data.examples import TooLong, fitting, laid_out, plan_rows
from stack_train.data.files import expand_glob, read_text
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.text import check_positions, check_vocabulary, language_model_shapes
from stack_train.data.planned_rows import PlannedRows
from stack_train.data.settings import MixedSource, check_mix
from stack_train.data.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from stack_train.data.mixture import MixedBatches

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


class ChatBatches(PlannedRows):
    """Batches of conversations; see `Batches`."""

    _EXAMPLES = "conversations"
    _SETTINGS = ("seq_tokens", "batch_size", "packed", "validation_fraction")

    def _plan(self, chosen: Int64[np.ndarray, " chosen"]) -> list[Int64[np.ndarray, " in_row"]]:
        # A conversation of n tokens has n - 1 inputs.
        lengths = np.asarray([len(self._examples[index].tokens) - 1 for index in chosen], np.int64)
        return [chosen[row] for row in plan_rows(lengths, self._config.seq_tokens, packed=self._config.packed)]

    def _row(self, examples: Sequence[Conversation]) -> dict[str, Any]:
        return laid_out(examples, self._config.seq_tokens)

    @cached_property
    def supervised_tokens(self) -> int:
        """Number of supervised targets in one epoch."""
        indices = np.concatenate(self._training)
        return sum(int(self._examples[index].supervised[1:].sum()) for index in indices)


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
