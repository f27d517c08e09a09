"""Settings of text data: documents, tokenizer and rows."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError

__all__ = ["BPE", "MixedSource", "TextSettings", "check_mix", "saved_addresses", "source_addresses"]

BPE = "bpe"


@config
class MixedSource:
    """A source of a mixture.

    Attributes:
      source: address of the source, as in `data.source`.
      weight: weight of the source; its share of the rows is its weight divided by the sum of all weights.
      text_field: key of a record's text, for sources of records; None uses the source's default.
    """

    source: str
    weight: PositiveFloat = 1.0
    text_field: str | None = None


def check_mix(mix: Mapping[str, MixedSource], other: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a mixture is combined with settings of a single source, or a name fits no metric.

    Args:
      mix: sources by name.
      other: explicit settings, by key, that have no effect in a mixture.
    """
    for name in mix:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(
                f"data.mix names a source {name!r}; expected letters, digits, '_', '-' and '.', since metrics are "
                "named after it. Rename it."
            )
    for key, value in other.items():
        raise ConfigError(
            f"{key} is {value!r}, but the sources are in data.mix ({', '.join(mix)}). Remove {key}, or data.mix."
        )


def source_addresses(data: Any) -> dict[str, str]:
    """Returns the addresses of a data config's sources by key; empty if the data has none."""
    if mix := getattr(data, "mix", None):
        return {f"data.mix.{name}.source": each.source for name, each in mix.items()}
    source = getattr(data, "source", None)
    return {"data.source": source} if isinstance(source, str) else {}


def saved_addresses(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns `source_addresses` of a saved config's section `data`."""
    if mix := data.get("mix"):
        return {f"data.mix.{name}.source": each["source"] for name, each in mix.items()}
    source = data.get("source")
    return {"data.source": source} if isinstance(source, str) else {}


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
