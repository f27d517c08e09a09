"""Truncation of prompts that are longer than the model or the request allows."""

from stack_core.abi.data import Tokenizer
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.text.embeddings import is_encoder

__all__ = ["encoder_ending", "truncated_tokens"]


def encoder_ending(checkpoint: GenerativeCheckpoint) -> tuple[int, ...] | None:
    """Returns the special tokens that an encoder's tokenizer adds to the end of a text; None for a language model."""
    if not is_encoder(checkpoint):
        return None
    return () if checkpoint.tokenizer is None else _ending(checkpoint.tokenizer)


def _ending(tokenizer: Tokenizer) -> tuple[int, ...]:
    with_special, plain = list(tokenizer.encode("a")), list(tokenizer.encode("a", add_special_tokens=False))
    places = [place for place in range(len(with_special)) if with_special[place : place + len(plain)] == plain]
    return tuple(with_special[places[0] + len(plain) :]) if places else ()


def truncated_tokens(tokens: tuple[int, ...], max_tokens: int, ending: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns at most `max_tokens` tokens of a prompt.

    Args:
      tokens: the prompt.
      max_tokens: maximum number of tokens, at least 1.
      ending: special tokens at the end of an encoder's texts, which keep their first tokens and the ending. None keeps
        the last tokens, which a continuation follows.
    """
    if len(tokens) <= max_tokens:
        return tokens
    if ending is None:
        return tokens[-max_tokens:]
    kept = ending if len(ending) < max_tokens and tokens[len(tokens) - len(ending) :] == ending else ()
    return tokens[: max_tokens - len(kept)] + kept
