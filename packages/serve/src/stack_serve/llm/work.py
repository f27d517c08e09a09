"""A request that an engine works on: its continuations, and what it tells of them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stack_core.generation import FinishReason, GenerationRequest, GenerationUpdate, RequestTimes, TokenLogprob
from stack_serve.llm.output import Output
from stack_serve.llm.sampling import SamplingSettings
from stack_serve.llm.sequence import Sequence

__all__ = ["Continuation", "Work"]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Continuation:
    """One of a request's continuations: the scheduler's side of it, and what is made of its tokens."""

    sequence: Sequence
    settings: SamplingSettings
    output: Output
    work: "Work"


@dataclass(slots=True, eq=False)
class Work:
    """A request, from `submit` to the last update.

    Attributes:
      receive: gets its updates.
      unfinished: its continuations that have not ended.
      prompt_logprobs: of the tokens of the prompt, as far as they were asked for and computed.
    """

    request: GenerationRequest
    receive: Callable[[GenerationUpdate], None]
    submitted_s: float = field(default_factory=time.monotonic)
    unfinished: dict[int, Continuation] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob | None] = field(init=False)
    started_s: float | None = None
    first_token_s: float | None = None
    has_told: bool = False

    def __post_init__(self) -> None:
        self.prompt_logprobs = [None] * len(self.request.prompt)

    @property
    def deadline_s(self) -> float | None:
        """When it ends at the latest, of `time.monotonic()`."""
        return None if self.request.timeout_s is None else self.submitted_s + self.request.timeout_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether its deadline, if it has one, has passed."""
        return self.deadline_s is not None and now_s >= self.deadline_s

    def tell(self, update: GenerationUpdate, *, cached_tokens: int = 0) -> None:
        """Sends an update on, with what is known of the request as a whole; the last of a continuation ends it."""
        now_s = time.monotonic()
        if update.tokens and self.first_token_s is None:
            self.first_token_s = now_s
        update = replace(update, cached_tokens=cached_tokens)
        if update.index == 0 and not self.has_told:
            self.has_told = True
            is_computed = update.finish_reason in (None, "stop", "length")
            if self.request.sampling.prompt_logprobs is not None and is_computed:
                update = replace(update, prompt_logprobs=tuple(self.prompt_logprobs))
        if update.finish_reason is not None:
            times = RequestTimes(self.submitted_s, self.started_s, self.first_token_s, now_s)
            update = replace(update, times=times)
            self.unfinished.pop(update.index, None)
        try:
            self.receive(update)
        except Exception:  # A receiver's fault is its own; the other requests go on.
            _LOG.exception("The receiver of request %r failed", self.request.request_id)

    def end(self, continuation: Continuation, reason: FinishReason, *, error: str | None = None) -> None:
        """Ends a continuation for another reason than its tokens."""
        try:
            update = continuation.output.end(reason, error=error)
        except Exception:  # Whatever a tokenizer raises at what was held back; the end has to be told.
            update = GenerationUpdate(
                request_id=self.request.request_id,
                index=continuation.sequence.index,
                finish_reason=reason,
                error=error,
            )
        self.tell(update, cached_tokens=continuation.sequence.cached_tokens)
