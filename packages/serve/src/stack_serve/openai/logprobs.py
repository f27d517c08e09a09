"""Log-probabilities in the shapes of the interfaces."""

from collections.abc import Iterable, Sequence
from typing import Any

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import TokenLogprob
from stack_serve.http.slices import Items, Members, batches

__all__ = ["LogprobWriter", "TokenTexts"]

_LEAST = -9999.0  # vLLM's value for minus infinity, which JSON lacks


class TokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """U+FFFD where it is a part of a character."""
        return self._of(token)[0]

    def bytes_of(self, token: int) -> list[int]:
        """In UTF-8."""
        return self._of(token)[1]

    def _of(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            own = self._tokenizer.token_bytes(token)
            found = self._known[token] = own.decode("utf-8", "replace"), list(own)
        return found


class LogprobWriter:
    """Writes the log-probabilities of a request.

    Args:
      texts: texts of tokens; None if the model lacks a tokenizer.
      as_ids: writes tokens as "token_id:17" instead of their text.
    """

    def __init__(self, texts: TokenTexts | None, *, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def chat(self, logprobs: Sequence[TokenLogprob]) -> Members:
        """Formats log-probabilities for `/v1/chat/completions`."""
        few = batches(logprobs, _entries(logprobs))
        return Members(content=Items([self._chat_entry(each) for each in batch] for batch in few))

    def completion(
        self, logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int], offsets: Iterable[Sequence[int]]
    ) -> Members:
        """Formats log-probabilities for `/v1/completions`; the most likely tokens include the sampled one.

        Args:
          offsets: offsets of the tokens in the text, in batches.
        """
        # Checked here because the zips below run while the answer is being sent, too late for an error.
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens have {len(logprobs)} log-probabilities")
        own = ([None if each is None else _finite(each.logprob) for each in batch] for batch in batches(logprobs))
        entries = _entries(logprobs)
        pairs = zip(batches(tokens, entries), batches(logprobs, entries), strict=True)
        return Members(
            text_offset=Items(offsets),
            token_logprobs=Items(own),
            tokens=Items([self._text(token) for token in batch] for batch in batches(tokens)),
            top_logprobs=Items(list(map(self._top, *pair)) for pair in pairs),
        )

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> Items:
        """Formats log-probabilities for vLLM's field `prompt_logprobs`, by token id."""
        few = batches(logprobs, _entries(logprobs))
        return Items([None if each is None else self._by_id(each) for each in batch] for batch in few)

    def _top(self, token: int, each: TokenLogprob | None) -> dict[str, float] | None:
        """By text; of tokens that look alike, the most likely."""
        if each is None:
            return None
        top: dict[str, float] = {}
        for other, logprob in (*each.top, (token, each.logprob)):
            top.setdefault(self._text(other), _finite(logprob))
        return top

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(token, logprob) for token, logprob in each.top]
        return {**self._chat_token(each.token, each.logprob), "top_logprobs": top}

    def _by_id(self, each: TokenLogprob) -> dict[str, Any]:
        known = {token: (place, logprob) for place, (token, logprob) in enumerate(each.top, start=1)}
        # Last, because the sampled token may lie outside the alternatives and has its own rank.
        known[each.token] = (each.rank, each.logprob)
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, (rank, logprob) in known.items()
        }

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": None if self._texts is None else self._texts.bytes_of(token),
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids or self._texts is None else self._texts.text(token)


def _entries(logprobs: Sequence[TokenLogprob | None]) -> int:
    """Returns the maximum number of entries of a token: its own and the alternatives."""
    return 1 + max((len(each.top) for each in logprobs if each is not None), default=0)


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # in this order, NaN gives the least, too
