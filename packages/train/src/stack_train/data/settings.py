"""Settings of text data: documents, tokenizer and rows."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = ["BPE", "TextSettings"]

BPE = "bpe"


@config
class TextSettings:
    """The training documents of a model, and how they become batches.

    Attributes:
      source: "scheme" or "scheme:address"; the scheme is a name in the registry `data_sources`.
      text_field: key of a record's text, for sources of records; None uses the source's default.
      tokenizer: "bpe" to train a byte-level BPE on the source; otherwise the path of a directory or `tokenizer.json`.
        None uses the tokenizer of `run.init_from`, or trains a BPE if the run starts from scratch.
      vocab_size: vocabulary size, special tokens included. An existing tokenizer must have exactly this size. None
        accepts any existing tokenizer, and trains a BPE of the model's size, or smaller if the documents have too few
        words.
      tokenizer_bytes: maximum number of UTF-8 bytes of training documents that the BPE is trained on.
      seq_tokens: tokens per row.
      batch_size: rows per batch, over all processes.
      validation_fraction: fraction of the documents held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
    """

    source: str = "stdlib"
    text_field: str | None = None
    tokenizer: str | None = None
    vocab_size: PositiveInt | None = None
    tokenizer_bytes: PositiveInt = 4_000_000
    seq_tokens: PositiveInt = 512
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2

    @property
    def trains_tokenizer(self) -> bool:
        """Returns True if a BPE tokenizer is trained on the source."""
        return self.tokenizer in (None, BPE)
