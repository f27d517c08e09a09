"""Text and tokens as the interface shows them: with or without what a tokenizer adds, and one token's own text."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Protocol, runtime_checkable

from stack_core.protocols import Tokenizer

__all__ = ["TokenTexts", "TokensKnowBytes"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class TokensKnowBytes(Protocol):
    """A tokenizer that can tell what a single token stands for, also where that is a part of a character."""

    def token_bytes(self, token: int) -> bytes: ...


class TokenTexts:
    """A tokenizer, and what it takes to show its tokens one by one.

    Args:
      special_tokens: texts of tokens that the tokenizer leaves out of text, by their part, such as `eos_token`.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._prefix, self._suffix = _additions(tokenizer)
        self._names: dict[int, str] = {}
        for text in special_tokens.values():
            tokens = self.encode(text, add_special_tokens=False)
            if len(tokens) == 1:
                self._names[tokens[0]] = text
        # Some tokenizers drop a space where a text begins, so a token's text is what it adds to another.
        self._before = list(self.encode("a", add_special_tokens=False))[-1:]
        self._before_characters = len(tokenizer.decode(self._before))
        self._shown: dict[int, tuple[str, bytes | None]] = {}

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The tokens of a prompt.

        Args:
          add_special_tokens: those that the tokenizer puts around a text, such as one for its beginning.
        """
        tokens = self._tokenizer.encode(text)
        return tokens if add_special_tokens else tokens[self._prefix : len(tokens) - self._suffix]

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return self._tokenizer.decode(tokens)

    def text(self, token: int) -> str:
        """What one token stands for; U+FFFD where that is a part of a character."""
        return self._show(token)[0]

    def bytes_of(self, token: int) -> bytes | None:
        """What one token stands for; None where it is a part of a character and the tokenizer does not tell which."""
        return self._show(token)[1]

    def _show(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._shown:
            self._shown[token] = self._found(token)
        return self._shown[token]

    def _found(self, token: int) -> tuple[str, bytes | None]:
        if token in self._names:
            return self._names[token], self._names[token].encode()
        if isinstance(self._tokenizer, TokensKnowBytes):
            known = self._tokenizer.token_bytes(token)
            return known.decode("utf-8", "replace"), known
        text = self._tokenizer.decode([*self._before, token])[self._before_characters :]
        return text, None if _REPLACEMENT in text else text.encode()


def _additions(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many tokens are put before and behind every text."""
    around = list(tokenizer.encode(""))
    if not around:
        return 0, 0
    texts = zip(around, tokenizer.encode("a"), tokenizer.encode("b"), strict=False)
    prefix = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, texts))
    return prefix, len(around) - prefix
