"""Embeddings of texts: the settings that the authors of a checkpoint recommend, and encoders, which only embed."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from stack_core.abi.engines import Pooling
from stack_core.abi.errors import GenerationError
from stack_core.abi.models import Outputs
from stack_core.text.sources import check_continues

__all__ = ["EmbeddingSettings", "EmbedsText", "TextEncoder", "check_generates", "embedding_settings_of", "is_encoder"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Conversion of hidden states to one vector per text.

    Attributes:
      pooling: see `Pooling`.
      normalize: whether vectors are scaled to length 1.
    """

    pooling: Pooling = "last"
    normalize: bool = True


@runtime_checkable
class TextEncoder(Protocol):
    """A model of text whose tokens attend to each other in both directions, such as BERT; it continues no texts.

    Attributes:
      bidirectional: True.
    """

    bidirectional: bool

    def __call__(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None) -> Outputs:
        """Computes hidden states; the arguments are as in `LanguageModel`."""
        ...


@runtime_checkable
class EmbedsText(Protocol):
    """A `GenerativeCheckpoint` that recommends settings for embeddings.

    Attributes:
      embedding: the settings; None if the checkpoint has none.
      generates: False for an encoder, whose model has no `states`, `head` and `logits`. Its tokenizer keeps the special
        tokens at both ends of a text.
    """

    embedding: EmbeddingSettings | None
    generates: bool


def embedding_settings_of(checkpoint: Any) -> EmbeddingSettings:
    """Returns the settings of a checkpoint, or the default ones."""
    found = checkpoint.embedding if isinstance(checkpoint, EmbedsText) else None
    return EmbeddingSettings() if found is None else found


def is_encoder(checkpoint: Any) -> bool:
    """Returns whether a checkpoint embeds texts without generating any."""
    return isinstance(checkpoint, EmbedsText) and not checkpoint.generates


def check_generates(checkpoint: Any) -> None:
    """Raises a GenerationError if a checkpoint does not continue texts: an encoder, or a model that reads a source."""
    check_continues(checkpoint)
    if is_encoder(checkpoint):
        raise GenerationError(
            f"{checkpoint.name} is an encoder: it embeds texts and generates none. Serve it with `stack serve` and ask "
            "/v1/embeddings, or use LLM.embed of stack-serve.",
            parameter="model",
        )
