"""`data.name: text`: documents packed into rows for next-token prediction."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from pydantic import Field

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.settings import MixedSource, TextSettings, check_mix, source_addresses

if TYPE_CHECKING:
    from stack_train.data.mixture import MixedBatches
    from stack_train.data.pipeline import Pipeline

__all__ = ["TextData", "check_positions", "check_vocabulary", "language_model_shapes"]


def language_model_shapes(batch_size: int, seq_tokens: int) -> Shapes:
    """Returns the shapes and dtypes of a batch for a language model."""
    names = ("tokens", "targets", "positions", "segment_ids")
    return {name: jax.ShapeDtypeStruct((batch_size, seq_tokens), np.int32) for name in names}


def check_positions(seq_tokens: int, model: Any) -> None:
    """Raises a ConfigError if rows are longer than the model's maximum sequence length."""
    if seq_tokens > model.max_positions:
        raise ConfigError(
            f"data.seq_tokens is {seq_tokens}, but model.max_positions is {model.max_positions}. "
            "Lower data.seq_tokens or raise model.max_positions."
        )


@config
class TextData(TextSettings):
    """Documents packed into rows; see `TextSettings` for more fields.

    Attributes:
      name: selects this kind of data.
      packing: "windows" concatenates documents and cuts them at row boundaries, which fills every row. "best_fit" packs
        complete documents into rows and cuts only documents longer than a row.
      mix: sources by name, with weights, in place of `source` and `text_field`. The row is the unit of the mixture:
        each row has documents of one source. Shares are exact up to a row for each source, and metrics report each
        source's share and epochs.
    """

    name: Literal["text"] = "text"
    packing: Literal["windows", "best_fit"] = "windows"
    mix: Mapping[str, MixedSource] = Field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Returns True if all documents are tokenized; all processes of a run then build the data at once."""
        return all(source.partition(":")[0] == "prepared" for source in source_addresses(self).values())

    def spec(self, model: Any) -> Shapes:
        # An imported model may have fewer positions than a row; `check` rejects training on such rows.
        return language_model_shapes(self.batch_size, min(self.seq_tokens, model.max_positions))

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * self.seq_tokens

    def check(self, model: Any) -> None:
        check_positions(self.seq_tokens, model)
        if self.mix:
            changed = changed_fields(self, ("source", "text_field"))
            check_mix(self.mix, {f"data.{name}": getattr(self, name) for name in changed})
        if self.is_ready and changed_fields(self, ("tokenizer_bytes",)):
            raise ConfigError(
                "data.tokenizer_bytes would have no effect: the documents are tokenized already (prepared:). Remove it."
            )
        if not self.trains_tokenizer and changed_fields(self, ("tokenizer_bytes",)):
            raise ConfigError(
                f"data.tokenizer is {self.tokenizer!r}, so data.tokenizer_bytes would have no effect. Remove it, or "
                "set data.tokenizer: bpe."
            )

    def build(self, *, seed: int, model: Any, cache_dir: Path | None = None) -> "Pipeline | MixedBatches":
        """Reads, tokenizes and splits the source, reusing cached results."""
        from stack_train.data.pipeline import build_mixture, build_pipeline  # imports Grain, which only a run needs

        options = {"seed": seed, "cache_dir": cache_dir, "packing": self.packing, "max_tokens": model.vocab_size}
        pipeline = build_mixture(self, self.mix, **options) if self.mix else build_pipeline(self, **options)
        check_vocabulary(pipeline.tokenizer.vocab_size, model)
        return pipeline


def check_vocabulary(tokens: int, model: Any) -> None:
    """Raises a ConfigError if a tokenizer has more tokens than the model's vocabulary."""
    if tokens > model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokens} tokens, but model.vocab_size is {model.vocab_size}. "
            f"Set model.vocab_size to {tokens} or more."
        )
