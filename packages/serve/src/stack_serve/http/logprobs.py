"""Log-probabilities in the shapes of the interfaces."""

from collections.abc import Sequence
from typing import Any

from stack_core.generation import TokenLogprob
from stack_core.protocols import Tokenizer

__all__ = ["LogprobWriter", "token_text"]

_LEAST = -9999.0  # what vLLM writes for minus infinity, which JSON lacks


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What one token stands for; U+FFFD where that is a part of a character."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


class LogprobWriter:
    """Writes the log-probabilities of a request.

    Args:
      tokenizer: None where the model has none.
      as_ids: tokens are shown as "token_id:17" instead of their text.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As `/v1/chat/completions` has them."""
        content = [
            {
                **self._chat_token(each.token, each.logprob),
                "top_logprobs": [self._chat_token(token, logprob) for token, logprob in each.top],
            }
            for each in logprobs
        ]
        return {"content": content}

    def completion(self, logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int], offset: int) -> dict[str, Any]:
        """As `/v1/completions` has them; the sampled token is among the most likely ones even if it is none of them.

        Args:
          offset: characters before the first token.
        """
        result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, each in zip(tokens, logprobs, strict=True):
            text = self._text(token)
            result["text_offset"].append(offset)
            result["tokens"].append(text)
            offset += len(text)
            if each is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            top: dict[str, float] = {}  # of tokens that look alike, the most likely
            for other, logprob in (*each.top, (token, each.logprob)):
                top.setdefault(self._text(other), _finite(logprob))
            result["token_logprobs"].append(_finite(each.logprob))
            result["top_logprobs"].append(top)
        return result

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """As vLLM's field `prompt_logprobs` has them: by token id."""
        return [None if each is None else self._by_id(each) for each in logprobs]

    def _by_id(self, each: TokenLogprob) -> dict[str, Any]:
        known = {token: (place, logprob) for place, (token, logprob) in enumerate(each.top, start=1)}
        known[each.token] = (each.rank, each.logprob)
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, (rank, logprob) in known.items()
        }

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": None if self._tokenizer is None else list(self._tokenizer.token_bytes(token)),
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids or self._tokenizer is None else token_text(self._tokenizer, token)


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # in this order, NaN gives the least, too
