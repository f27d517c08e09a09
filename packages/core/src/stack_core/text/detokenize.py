"""Incremental detokenization: emits only complete characters, and no part of a stop text."""

import codecs
from collections.abc import Sequence
from functools import lru_cache

from stack_core.abi.data import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopTexts", "prompt_text"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_PENDING = 16
_CONTEXT_TOKENS = 8
_CHARACTER_BYTES = 4  # length of the longest UTF-8 character


def prompt_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decodes the tokens of a prompt up to the last complete character; a partial one belongs to the continuation."""
    return _complete_text(tokenizer, tokens)[0]


def _complete_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, int]:
    """Returns the text up to the last complete character, and the number of trailing tokens of a partial one.

    The trailing tokens are not decoded: tokenizers with byte fallback decode adjacent bytes together, and lose the
    complete characters before an incomplete one.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes, tokens[-_CHARACTER_BYTES:])))
    rest, end = len(decoder.getstate()[0]), len(tokens)
    while rest and len(tokenizer.token_bytes(tokens[end - 1])) <= rest:
        end -= 1
        rest -= len(tokenizer.token_bytes(tokens[end]))
    text = tokenizer.decode(tokens[:end])
    # The last token completes a character and begins another one.
    return text.removesuffix(_REPLACEMENT) if rest else text, len(tokens) - end


def _context(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Returns the last tokens, from the start of a character."""
    begin = max(0, len(tokens) - _CONTEXT_TOKENS)
    first = max(0, begin - _CHARACTER_BYTES + 1)
    # A continuation byte of UTF-8: this token begins within a character.
    while begin > first and 0x80 <= next(iter(tokenizer.token_bytes(tokens[begin])), 0) < 0xC0:
        begin -= 1
    return list(tokens[begin:])


class IncrementalDetokenizer:
    """A decoder for a growing sequence of tokens.

    Invariant: the pieces returned by `push` and `flush` concatenate to the text of all tokens after `prompt_text`.

    A character may span several tokens. Until it is complete, the decoded text ends with U+FFFD and is held back, but
    for at most 16 tokens: otherwise a long run of invalid bytes would be decoded again for each token. A character that
    begins at the end of such a run is lost. Each piece is decoded together with the tokens of the previous piece,
    because some tokenizers decode a token differently at the beginning of a text.

    Args:
      tokenizer: tokenizer of the model.
      prompt_tokens: tokens that the text continues; decoded in the first `push` or `flush`.
      skip_special_tokens: whether to omit special tokens from the text; otherwise the text shows their names.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._prompt: Sequence[int] | None = prompt_tokens
        self._context: list[int] = []
        self._pending: list[int] = []
        self._context_text: str | None = None
        self._special: dict[int, str] | None = None if skip_special_tokens else {}

    def push(self, token: int) -> str:
        """Adds a token and returns the text that became final with it, often ""."""
        self._read_prompt()
        if self._special is not None and (name := self._special_name(token)):
            return self.flush() + name
        self._pending.append(token)
        piece = self._piece()
        if not piece:
            # Tokens without text, such as skipped ones, must not accumulate.
            del self._pending[:-_MOST_PENDING]
        is_whole = not piece.endswith(_REPLACEMENT) or len(self._pending) > _MOST_PENDING
        return self._take(piece) if is_whole else ""

    def flush(self) -> str:
        """Returns the text held back; incomplete characters become U+FFFD."""
        self._read_prompt()
        return self._take(self._piece())

    def _read_prompt(self) -> None:
        if self._prompt is None:
            return
        tokens = _context(self._tokenizer, self._prompt)
        self._context_text, part = _complete_text(self._tokenizer, tokens)
        self._context, self._pending = tokens[: len(tokens) - part], tokens[len(tokens) - part :]
        self._prompt = None

    def _special_name(self, token: int) -> str:
        """Returns the name of a special token, and "" for other tokens.

        A token is special if decoding it twice in a row gives no text. (Decoding some ordinary tokens once gives none
        either.)
        """
        assert self._special is not None
        if token not in self._special:
            is_special = not self._tokenizer.decode([token, token])
            self._special[token] = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if is_special else ""
        return self._special[token]

    def _piece(self) -> str:
        if self._context_text is None:
            self._context_text = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(self._context_text) :]

    def _take(self, piece: str) -> str:
        if piece:
            self._context, self._context_text = self._pending, None
            self._pending = []
        return piece


class StopTexts:
    """A filter that passes text through up to the first stop text, which may be split over several pieces.

    The cost per character is constant for each stop text, regardless of its length and of partial matches (Knuth,
    Morris and Pratt, Fast pattern matching in strings, 1977).

    Attributes:
      found: the stop text that was found, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._searches = [_Search(text) for text in dict.fromkeys(stop)]
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Adds text and returns the part that cannot belong to a stop text; "" once one was found.

        Args:
          may_stop: False ignores stop texts that end in this piece.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = list[tuple[int, str]]()
        for search in self._searches:
            end = search.push(piece)
            if end is not None and may_stop:
                matches.append((len(self._held) + end - len(search.text), search.text))
        if matches:
            # Of several matches in one piece, the earliest ends the text.
            begin, self.found = min(matches)
            self._held = ""
            return text[:begin]
        certain = len(text) - max((search.matched for search in self._searches), default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Search:
    """The search for one stop text in a growing text.

    Attributes:
      matched: length of the longest proper prefix of the stop text that is a suffix of the text.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def push(self, piece: str) -> int | None:
        """Adds text; returns the number of its characters before the end of the first match ending in it, or None."""
        text, borders, matched, found = self.text, self._borders, self.matched, None
        # Most pieces lack the first character, which `in` finds faster than the loop.
        if not matched and text[0] not in piece:
            return None
        for place, character in enumerate(piece, start=1):
            while matched and text[matched] != character:
                matched = borders[matched]
            matched += text[matched] == character
            if matched == len(text):
                found = place if found is None else found
                matched = borders[matched]
        self.matched = matched
        return found


# Most requests of a client have the same stop texts.
@lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """Returns the length of the longest proper border (prefix that is also a suffix) of each prefix of a text."""
    borders = [0, 0]
    for character in text[1:]:
        border = borders[-1]
        while border and text[border] != character:
            border = borders[border]
        borders.append(border + (text[border] == character))
    return tuple(borders)
