"""Character offsets of tokens in an answer's text."""

from collections.abc import Iterable, Iterator, Sequence

from stack_core.abi.data import Tokenizer
from stack_core.text.detokenize import IncrementalDetokenizer

__all__ = ["TextOffsets"]


class TextOffsets:
    """Counts the characters of a choice's text before each token.

    All tokens of one character have its offset. A special token that is no part of the text has the offset of the next
    token.

    Args:
      tokenizer: without one, all offsets are 0.
      prompt: tokens of the prompt.
      echo: text of the prompt that the choice begins with, or "".
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], echo: str, *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._place = len(echo)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)

    def of_prompt(self, tokens: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        """Returns the offsets of the prompt's tokens in the echo, batch by batch."""
        place = 0
        detokenizer = None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer, ())
        for batch in tokens:
            places: list[int] = []
            for token in batch:
                # The echo is the client's own text, which may be shorter than the decoded tokens.
                places.append(min(place, len(self._echo)))
                place += 0 if detokenizer is None else self._length_at(place, token, detokenizer.push(token))
            yield places

    def _length_at(self, place: int, token: int, text: str) -> int:
        """Counts the characters of a token in the echo, which may hold the name of a special token."""
        if text or self._tokenizer is None:
            return len(text)
        # The detokenizer skips special tokens, but the echo may contain their names.
        name = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return len(name) if self._echo.startswith(name, place) else 0

    def push(self, token: int) -> int:
        """Returns the offset of the continuation's next token."""
        place = self._place
        if self._detokenizer is not None:
            # The texts of single tokens cannot be summed: one character may consist of several tokens.
            self._place += len(self._detokenizer.push(token))
        return place
