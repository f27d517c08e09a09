"""Incremental output of a continuation: tokens, text and finish reason."""

from collections.abc import Collection
from typing import NamedTuple

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import FinishReason, GenerationRequest, GenerationUpdate, SamplingParams, TokenLogprob
from stack_core.text.detokenize import IncrementalDetokenizer, StopTexts

__all__ = ["GOES_ON", "EndOfTokens", "Ending", "Output"]


class EndOfTokens(NamedTuple):
    """Effect of a token on the end of its continuation, independent of the text.

    Attributes:
      reason: finish reason if the token is the last one, otherwise None.
      stop_reason: stop token of the request; None for an end token of the model.
    """

    reason: FinishReason | None = None
    stop_reason: int | None = None


GOES_ON = EndOfTokens()


class Ending:
    """Token-based stopping criterion of a continuation. Stop texts, detected by `Output`, may end it sooner.

    Args:
      sampling: parameters of the request.
      end_tokens: end tokens of the model.
      max_tokens: maximum length of the continuation.
    """

    def __init__(self, sampling: SamplingParams, *, end_tokens: Collection[int], max_tokens: int) -> None:
        self._end_tokens = frozenset() if sampling.ignore_eos else frozenset(end_tokens)
        self._stop_tokens = frozenset(sampling.stop_tokens)
        self._min_tokens, self._max_tokens = sampling.min_tokens, max_tokens
        self._tokens = 0

    def push(self, token: int) -> EndOfTokens:
        """Adds a token and returns the finish reason if it is the last one."""
        self._tokens += 1
        if self._tokens > self._min_tokens:
            if token in self._end_tokens:
                return EndOfTokens("stop")
            if token in self._stop_tokens:
                return EndOfTokens("stop", token)
        return EndOfTokens("length") if self._tokens >= self._max_tokens else GOES_ON

    def allows_end_token(self, *, ahead: int = 0) -> bool:
        """Returns whether the token after `ahead` more tokens may be an end token that ends the continuation."""
        return bool(self._end_tokens) and self._tokens + ahead >= self._min_tokens


class _PendingToken(NamedTuple):
    """A token that was not sent yet.

    Attributes:
      candidates: candidates of the token; () if not requested.
      version: version of the weights with which the token was sampled.
      begins: number of characters decoded before the token.
    """

    token: int
    logprob: TokenLogprob | None
    candidates: tuple[int, ...]
    version: int
    begins: int


class Output:
    """Converts the tokens of one continuation to updates.

    Updates exclude text with incomplete characters and text that may be the beginning of a stop text. For requests with
    stop texts, they also exclude the tokens of such text. A token is part of the continuation if its text begins before
    the end of the continuation's text. A stop token is always part of it, but its text only with `include_stop`.

    Args:
      request: request of the continuation.
      index: number of the continuation.
      tokenizer: tokenizer of the model; None returns tokens without text and requires a request without stop texts.
    """

    def __init__(self, request: GenerationRequest, index: int, *, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self._request_id, self._index, self._sampling = request.request_id, index, sampling
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            skip = sampling.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt, skip_special_tokens=skip)
        self._stop_texts = StopTexts(sampling.stop)
        self._tokens = 0
        self._decoded_characters = 0
        self._released_characters = 0
        self._pending: list[_PendingToken] = []
        self._text = ""
        self._reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def push(
        self,
        token: int,
        end: EndOfTokens = GOES_ON,
        logprob: TokenLogprob | None = None,
        *,
        candidates: tuple[int, ...] = (),
        version: int = 0,
    ) -> bool:
        """Adds a token and returns whether it is the last one.

        Args:
          end: finish reason due to the token itself.
          logprob: log-probability of the token, if requested.
          candidates: candidates of the token, if requested.
          version: version of the weights with which it was sampled.
        """
        self._tokens += 1
        begins = self._decoded_characters
        reason: FinishReason | None = end.reason
        stop_reason: int | str | None = end.stop_reason
        is_shown = reason != "stop" or self._sampling.include_stop
        if self._detokenizer and is_shown:
            self._text += self._passed(self._detokenizer.push(token))
        # A stop text may appear only when the rest is flushed, and takes precedence over the token's own reason.
        if reason is not None:
            self._text += self._rest()
        if self._stop_texts.found is not None:
            reason, stop_reason = "stop", self._stop_texts.found
        self._pending.append(_PendingToken(token, logprob, candidates, version, begins))
        self._reason, self._stop_reason = reason, stop_reason
        return reason is not None

    def take(self) -> GenerationUpdate:
        """Returns the output confirmed since the last update, with the finish reason after the last token."""
        return self._update(self._reason, stop_reason=self._stop_reason)

    def end(self, reason: FinishReason, *, error: str | None = None) -> GenerationUpdate:
        """Ends the continuation for an external reason and returns the text held back.

        Args:
          error: human-readable description of the failure.
        """
        self._text += self._rest()
        return self._update(reason, error=error)

    @property
    def _may_stop(self) -> bool:
        return self._tokens > self._sampling.min_tokens

    def _passed(self, piece: str) -> str:
        """Adds newly decoded text and returns the text that is certain to belong to the continuation."""
        if self._stop_texts.found is not None:
            return ""
        self._decoded_characters += len(piece)
        text = self._stop_texts.push(piece, may_stop=self._may_stop)
        if self._stop_texts.found is not None and self._sampling.include_stop:
            text += self._stop_texts.found
        self._released_characters += len(text)
        return text

    def _rest(self) -> str:
        """Flushes the text held back by the detokenizer and the stop texts."""
        text = self._passed(self._detokenizer.flush()) if self._detokenizer else ""
        return text + self._stop_texts.flush()

    def _update(
        self, reason: FinishReason | None, *, stop_reason: int | str | None = None, error: str | None = None
    ) -> GenerationUpdate:
        released = self._release_tokens(is_final=reason is not None)
        text, self._text = self._text, ""
        return GenerationUpdate(
            request_id=self._request_id,
            index=self._index,
            tokens=tuple(pending.token for pending in released),
            text=text,
            weights_versions=tuple(pending.version for pending in released),
            logprobs=None
            if self._sampling.logprobs is None
            else tuple(pending.logprob for pending in released if pending.logprob is not None),
            candidates=tuple(pending.candidates for pending in released) if self._sampling.candidates else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            dropped_tokens=0 if reason is None else len(self._pending),
            error=error,
        )

    def _release_tokens(self, *, is_final: bool) -> list[_PendingToken]:
        """Removes and returns the pending tokens that are certain to be part of the continuation."""
        cut = self._stop_texts.found is not None
        # A stop text may still cut text that is pending; without stop texts, tokens are released at once.
        if cut or (self._sampling.stop and not is_final):
            count = sum(pending.begins < self._released_characters for pending in self._pending)
        else:
            count = len(self._pending)
        released, self._pending = self._pending[:count], self._pending[count:]
        return released
