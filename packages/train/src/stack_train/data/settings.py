"""What documents a run reads, and how they are cut into rows."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = ["BPE", "TextSettings"]

BPE = "bpe"


@config
class TextSettings:
    """What a model is trained on, and how it is cut into batches.

    Attributes:
      source: "scheme" or "scheme:address"; the scheme is a name in the registry `data_sources`.
      text_field: the key that holds a record's text, for sources of records; None leaves the source's own default.
      tokenizer: "bpe" trains a byte-level BPE on the source; otherwise the path of a directory or `tokenizer.json`.
        None takes that of `run.init_from`, and trains a BPE where a run starts from nothing.
      vocab_size: tokens of the BPE to train, special tokens included; a ready tokenizer must have exactly as many.
        None takes the model's for the BPE, or as many as the documents have words for, and whatever a ready one has.
      tokenizer_bytes: UTF-8 bytes of training documents that the BPE is trained on, at most.
      seq_tokens: tokens in a row.
      batch_size: rows in a batch, over all processes.
      validation_fraction: share of the documents that is held out of training.
      prefetch_batches: batches assembled ahead of the step by a thread; 0 assembles them in the step's thread.
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
        return self.tokenizer in (None, BPE)
