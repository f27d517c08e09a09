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
from stack_core.ops.sampling.sampling import Sampled, candidate_tokens
from stack_core.runtime.spans import record_span, spans_recorded
from stack_serve.llm.output import GOES_ON, EndOfTokens
from stack_serve.llm.work import Continuation, Work

__all__ = ["Dispatcher", "End", "OutputEvent", "PromptScores", "Tokens"]

_LOG = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """Tokens that a step generated for a continuation.

    Attributes:
      continuation: continuation of the tokens.
      tokens: tokens in order.
      version: version of the weights with which the tokens were sampled.
      end: finish reason due to the last token, if any.
      figures: host arrays whose rows at `index` hold the log-probabilities and candidates of the tokens; None if not
        requested.
    """

    continuation: Continuation
    tokens: Sequence[int]
    version: int = 0
    end: EndOfTokens = GOES_ON
    figures: Sampled | None = None
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


OutputEvent = Tokens | PromptScores | End


class Dispatcher:
    """Delivers updates to receivers; anything that arrives after the end of a continuation is ignored.

    This thread also checks deadlines, which therefore expire on time even if a step is slow or hangs.

    Args:
      on_stop: called after a continuation ended here without the engine loop's knowledge.
      on_end: called before the last update of a request is delivered.
    """

    def __init__(self, *, on_stop: Callable[[Continuation], None], on_end: Callable[[Work], None]) -> None:
        self._on_stop = on_stop
        self._on_end = on_end
        self._queue = queue.SimpleQueue[list[OutputEvent] | Work | None]()
        self._deadlines: list[tuple[float, int, Work]] = []
        self._deadline_ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="stack-text", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Delivers everything in the queue and stops the thread."""
        self._queue.put(None)
        self._thread.join()

    def put(self, events: list[OutputEvent]) -> None:
        """Queues results for delivery in order (thread-safe, non-blocking)."""
        self._queue.put(events)

    def watch(self, work: Work) -> None:
        """Registers the deadline of a request, if it has one; the request ends when it expires."""
        if work.deadline_s is not None:
            self._queue.put(work)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            for event in batch:
                try:
                    self._handle(event)
                except BaseException as error:  # Even a panic of one request must not affect other requests.
                    self._fail(event.continuation, error)

    def _next(self) -> list[OutputEvent] | None:
        """Waits for the next results; expired deadlines go before tokens."""
        while True:
            left_s = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
            if left_s is not None and left_s <= 0:
                _, _, work = heapq.heappop(self._deadlines)
                return [End(continuation, "deadline") for continuation in work.continuations]
            try:
                item = self._queue.get(timeout=left_s)
            except queue.Empty:
                continue
            if not isinstance(item, Work):
                return item
            # The id orders equal deadlines, because `Work` cannot be compared.
            heapq.heappush(self._deadlines, (item.deadline_s or 0.0, next(self._deadline_ids), item))

    def _fail(self, continuation: Continuation, error: BaseException) -> None:
        """Ends a continuation whose update failed."""
        _LOG.error("The update of request %r cannot be delivered", continuation.work.request.request_id, exc_info=error)
        if not continuation.has_ended:
            self._deliver(continuation, _bare_end(continuation, "error", f"The update cannot be delivered: {error!r}"))
            self._on_stop(continuation)

    def _handle(self, event: OutputEvent) -> None:
        continuation = event.continuation
        # The engine runs one step ahead, so tokens may follow a stop text or a deadline.
        if continuation.has_ended:
            return
        if isinstance(event, End):
            self._deliver(continuation, _final_update(continuation, event.reason, event.error))
            # The engine loop reported the end for every other reason and dropped the continuation itself.
            if event.reason == "deadline":
                self._on_stop(continuation)
        elif isinstance(event, PromptScores):
            sampling = continuation.work.request.sampling
            records = token_records(event.figures, event.index, sampling.prompt_logprobs or 0)
            continuation.work.prompt_logprobs[event.position : event.position + len(records)] = records
        else:
            self._handle_tokens(event)

    def _handle_tokens(self, event: Tokens) -> None:
        continuation = event.continuation
        output, sampling = continuation.output, continuation.work.request.sampling
        records = candidates = None
        if event.figures is not None and sampling.logprobs is not None:
            records = token_records(event.figures, event.index, sampling.logprobs)
        if event.figures is not None and sampling.candidates:
            candidates = candidate_tokens(event.figures.candidates[event.index])
        last = len(event.tokens) - 1
        for place, token in enumerate(event.tokens):
            try:
                end, logprob = event.end if place == last else GOES_ON, records[place] if records else None
                own = candidates[place] if candidates else ()
                has_ended = output.push(token, end, logprob, candidates=own, version=event.version)
            except Exception as error:  # A tokenizer error affects only this request.
                self._deliver(continuation, output.take())
                message = f"Token {token} cannot be decoded: {error}"
                self._deliver(continuation, _final_update(continuation, "error", message))
                self._on_stop(continuation)
                return
            if has_ended:
                break
        update = output.take()
        self._deliver(continuation, update)
        # A stop text ended it, which the engine loop cannot detect.
        if update.finish_reason is not None and event.end is GOES_ON:
            self._on_stop(continuation)

    def _deliver(self, continuation: Continuation, update: GenerationUpdate) -> None:
        work = continuation.work
        update = work.completed(update, cached_tokens=continuation.sequence.cached_tokens)
        is_end = update.finish_reason is not None
        # Before the delivery: a client may submit the id again as soon as it gets the last update.
        if is_end and work.unfinished == 1:
            self._on_end(work)
        if spans_recorded():
            fields = {"request": update.request_id, "index": update.index, "end": update.finish_reason}
            record_span("stream", 0.0, tokens=len(update.tokens), **fields)
        work.deliver(update)
        if is_end:
            continuation.has_ended = True
            work.unfinished -= 1


def _final_update(continuation: Continuation, reason: FinishReason, error: str | None) -> GenerationUpdate:
    """Returns the last update of a continuation that ends for an external reason."""
    try:
        return continuation.output.end(reason, error=error)
    except Exception:  # The end must be delivered even if the tokenizer fails on held-back text.
        return _bare_end(continuation, reason, error)


def _bare_end(continuation: Continuation, reason: FinishReason, error: str | None) -> GenerationUpdate:
    request_id, index = continuation.work.request.request_id, continuation.sequence.index
    return GenerationUpdate(request_id=request_id, index=index, finish_reason=reason, error=error)
