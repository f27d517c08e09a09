"""`data.kind: text`: documents cut into rows, for next-token prediction."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.settings import TextSettings

if TYPE_CHECKING:
    from stack_train.data.pipeline import Pipeline

__all__ = ["TextData", "check_positions", "check_vocabulary", "language_model_shapes"]


def language_model_shapes(batch_size: int, seq_tokens: int) -> Shapes:
    """What a batch of rows of tokens looks like to a step."""
    names = ("tokens", "targets", "positions", "segment_ids")
    return {name: jax.ShapeDtypeStruct((batch_size, seq_tokens), np.int32) for name in names}


def check_positions(seq_tokens: int, model: Any) -> None:
    """Raises a ConfigError where rows are longer than the model's longest sequence."""
    if seq_tokens > model.max_positions:
        raise ConfigError(
            f"data.seq_tokens is {seq_tokens}, but model.max_positions is {model.max_positions}. "
            "Raise the one or lower the other."
        )


@config
class TextData(TextSettings):
    """Documents cut into rows.

    Attributes:
      packing: "windows" lays documents one after another and cuts them wherever a row ends: all rows are full.
        "best_fit" puts whole documents into the rows that they fit into best, and cuts those alone that are longer.
    """

    kind: Literal["text"] = "text"
    packing: Literal["windows", "best_fit"] = "windows"

    def spec(self, model: Any) -> Shapes:
        # A model that was imported may have fewer positions than these rows; training on them is refused by `check`.
        return language_model_shapes(self.batch_size, min(self.seq_tokens, model.max_positions))

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * self.seq_tokens

    def check(self, model: Any) -> None:
        check_positions(self.seq_tokens, model)
        if not self.trains_tokenizer and changed_fields(self, ("tokenizer_bytes",)):
            raise ConfigError(
                f"data.tokenizer is {self.tokenizer!r}, so data.tokenizer_bytes would not act. Leave that out, or set "
                "data.tokenizer: bpe."
            )

    def build(self, *, seed: int, model: Any, cache_dir: Path | None = None) -> "Pipeline":
        """Reads, tokenizes and splits the source; what the cache holds is not done again."""
        from stack_train.data.pipeline import build_pipeline  # loads Grain, which only a run needs

        pipeline = build_pipeline(
            self, seed=seed, cache_dir=cache_dir, packing=self.packing, most_tokens=model.vocab_size
        )
        check_vocabulary(pipeline.tokenizer.vocab_size, model)
        return pipeline


def check_vocabulary(tokens: int, model: Any) -> None:
    """Raises a ConfigError where a tokenizer has tokens that the model has not."""
    if tokens > model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokens} tokens, but model.vocab_size is {model.vocab_size}. "
            f"Set model.vocab_size to {tokens} or more."
        )
