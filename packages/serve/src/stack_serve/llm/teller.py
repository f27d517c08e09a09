"""Thread that detokenizes tokens and delivers updates, to keep this work out of the engine thread."""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stack_core.abi.generation import FinishReason, GenerationUpdate
from stack_core.ops.sampling.logprobs import Index, TokenLogprobs, token_records
from stack_serve.llm.output import GOES_ON, EndOfTokens
from stack_serve.llm.work import Continuation, Work

__all__ = ["End", "News", "PromptScores", "Teller", "Tokens"]

_LOG = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """Tokens that a step generated for a continuation.

    Attributes:
      continuation: continuation of the tokens.
      tokens: tokens in order.
      version: version of the weights with which the tokens were sampled.
      end: finish reason due to the last token, if any.
      figures: host arrays whose rows at `index` hold the log-probabilities of the tokens; None if not requested.
    """

    continuation: Continuation
    tokens: Sequence[int]
    version: int = 0
    end: EndOfTokens = GOES_ON
    figures: TokenLogprobs | None = None
    index: Index = ()


class PromptScores(NamedTuple):
    """Log-probabilities of the prompt tokens from `position` on: the rows of `figures` at `index`."""

    continuation: Continuation
    position: int
    figures: TokenLogprobs
    index: Index


class End(NamedTuple):
    """End of a continuation for a reason other than its tokens."""

    continuation: Continuation
    reason: FinishReason
    error: str | None = None


News = Tokens | PromptScores | End


class Teller:
    """Delivers updates to receivers; anything that arrives after the end of a continuation is ignored.

    This thread also checks deadlines, which therefore expire on time even if a step is slow or hangs.

    Args:
      stopped: called after a continuation ended here without the engine loop's knowledge.
      ended: called before the last update of a request is delivered.
    """

    def __init__(self, *, stopped: Callable[[Continuation], None], ended: Callable[[Work], None]) -> None:
        self._stopped = stopped
        self._ended = ended
        self._queue = queue.SimpleQueue[list[News] | Work | None]()
        self._deadlines: list[tuple[float, int, Work]] = []
        self._watched = itertools.count()
        self._thread = threading.Thread(target=self._run, name="stack-text", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Delivers everything in the queue and stops the thread."""
        self._queue.put(None)
        self._thread.join()

    def put(self, news: list[News]) -> None:
        """Queues results for delivery in order (thread-safe, non-blocking)."""
        self._queue.put(news)

    def watch(self, work: Work) -> None:
        """Registers the deadline of a request, if it has one; the request ends when it expires."""
        if work.deadline_s is not None:
            self._queue.put(work)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            for news in batch:
                try:
                    self._take_in(news)
                except BaseException as error:  # Even a panic of one request must not affect other requests.
                    self._fail(news.continuation, error)

    def _next(self) -> list[News] | None:
        """Waits for the next results; expired deadlines go before tokens."""
        while True:
            left_s = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
            if left_s is not None and left_s <= 0:
                _, _, work = heapq.heappop(self._deadlines)
                return [End(continuation, "deadline") for continuation in work.continuations]
            try:
                given = self._queue.get(timeout=left_s)
            except queue.Empty:
                continue
            if not isinstance(given, Work):
                return given
            heapq.heappush(self._deadlines, (given.deadline_s or 0.0, next(self._watched), given))

    def _fail(self, continuation: Continuation, error: BaseException) -> None:
        """Ends a continuation whose update failed."""
        _LOG.error("The update of request %r cannot be delivered", continuation.work.request.request_id, exc_info=error)
        if not continuation.has_ended:
            self._tell(continuation, _bare_end(continuation, "error", f"The update cannot be delivered: {error!r}"))
            self._stopped(continuation)

    def _take_in(self, news: News) -> None:
        continuation = news.continuation
        if continuation.has_ended:
            return
        if isinstance(news, End):
            self._tell(continuation, _ended(continuation, news.reason, news.error))
            if news.reason == "deadline":
                self._stopped(continuation)
        elif isinstance(news, PromptScores):
            sampling = continuation.work.request.sampling
            found = token_records(news.figures, news.index, sampling.prompt_logprobs or 0)
            continuation.work.prompt_logprobs[news.position : news.position + len(found)] = found
        else:
            self._take_in_tokens(news)

    def _take_in_tokens(self, news: Tokens) -> None:
        continuation = news.continuation
        output, wanted = continuation.output, continuation.work.request.sampling.logprobs
        found = None
        if news.figures is not None and wanted is not None:
            found = token_records(news.figures, news.index, wanted)
        last = len(news.tokens) - 1
        for place, token in enumerate(news.tokens):
            try:
                end, logprob = news.end if place == last else GOES_ON, found[place] if found else None
                has_ended = output.push(token, end, logprob, version=news.version)
            except Exception as error:  # A tokenizer error affects only this request.
                self._tell(continuation, output.take())
                message = f"Token {token} cannot be decoded: {error}"
                self._tell(continuation, _ended(continuation, "error", message))
                self._stopped(continuation)
                return
            if has_ended:
                break
        update = output.take()
        self._tell(continuation, update)
        if update.finish_reason is not None and news.end is GOES_ON:
            self._stopped(continuation)

    def _tell(self, continuation: Continuation, update: GenerationUpdate) -> None:
        work = continuation.work
        update = work.completed(update, cached_tokens=continuation.sequence.cached_tokens)
        is_end = update.finish_reason is not None
        if is_end and work.unfinished == 1:
            self._ended(work)
        work.tell(update)
        if is_end:
            continuation.has_ended = True
            work.unfinished -= 1


def _ended(continuation: Continuation, reason: FinishReason, error: str | None) -> GenerationUpdate:
    """Returns the last update of a continuation that ends for an external reason."""
    try:
        return continuation.output.end(reason, error=error)
    except Exception:  # The end must be delivered even if the tokenizer fails on held-back text.
        return _bare_end(continuation, reason, error)


def _bare_end(continuation: Continuation, reason: FinishReason, error: str | None) -> GenerationUpdate:
    request_id, index = continuation.work.request.request_id, continuation.sequence.index
    return GenerationUpdate(request_id=request_id, index=index, finish_reason=reason, error=error)
