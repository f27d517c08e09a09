"""Text from tokens as they come: only whole characters, and never a part of a stop text."""

from collections.abc import Sequence

from stack_core.protocols import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopTexts"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_PENDING = 16


class IncrementalDetokenizer:
    """Decodes a growing sequence of tokens.

    Invariant: the pieces that `push` and `flush` return add up to the text of all tokens after the prompt's.

    A character may be spread over several tokens; until it is whole the decoded text ends with U+FFFD, and is kept
    back. After 16 tokens it is not, lest a long run of bytes that are no text be decoded anew with each token; a
    character that begins at the end of such a run is lost. Each piece is decoded together with the tokens of the one
    before, because some tokenizers decode a token differently at the beginning of a text.

    Args:
      prompt_tokens: what the text continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_tokens[-8:])
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Adds a token and returns the text that became final with it, often ""."""
        self._pending.append(token)
        piece = self._piece()
        if not piece:
            del self._pending[:-_MOST_PENDING]
        is_whole = not piece.endswith(_REPLACEMENT) or len(self._pending) > _MOST_PENDING
        return self._take(piece) if is_whole else ""

    def flush(self) -> str:
        """Returns what was kept back; bytes that never became a character are U+FFFD."""
        return self._take(self._piece())

    def _piece(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(before) :]

    def _take(self, piece: str) -> str:
        if piece:
            self._context = self._pending
            self._pending = []
        return piece


class StopTexts:
    """Passes text on up to the first stop text, which may come in several pieces.

    Attributes:
      found: the stop text that was met, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Adds text and returns what is certain not to belong to a stop text; "" once one was found.

        Args:
          may_stop: False lets stop texts pass that end with this piece.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = [(text.find(stop), stop) for stop in self._stop if may_stop and stop in text]
        if matches:
            end, self.found = min(matches)
            self._held = ""
            return text[:end]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, short of all of it."""
    return next(size for size in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:size]))
