"""Checkpoints that generate a target text from a source text, such as T5, instead of continuing a text."""

from typing import Any, Protocol, runtime_checkable

from stack_core.abi.errors import GenerationError

__all__ = ["GeneratesFromSource", "check_continues", "start_token_of"]


@runtime_checkable
class GeneratesFromSource(Protocol):
    """A `GenerativeCheckpoint` whose model may read a source text.

    Attributes:
      start_token: token that begins every target; None for a model that continues its prompt.
    """

    start_token: int | None


def start_token_of(checkpoint: Any) -> int | None:
    """Returns the token that begins the targets of a checkpoint; None if its model continues texts."""
    return checkpoint.start_token if isinstance(checkpoint, GeneratesFromSource) else None


def check_continues(checkpoint: Any) -> None:
    """Raises a GenerationError if a checkpoint generates from a source text instead of continuing a text."""
    if start_token_of(checkpoint) is not None:
        raise GenerationError(
            f"{checkpoint.name} is an encoder-decoder: it generates a target from a source text and continues no "
            "prompt. Generate with `stack generate` or stack_train.load(...).generate.",
            parameter="model",
        )
