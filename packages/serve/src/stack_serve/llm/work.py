"""Engine-side state of a request: its continuations and updates."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stack_core.abi.generation import GenerationRequest, GenerationUpdate, RequestTimes, TokenLogprob
from stack_serve.llm.adapters import HostAdapter
from stack_serve.llm.constraints import ConstraintCompiler, Matcher
from stack_serve.llm.drafts import Drafts
from stack_serve.llm.output import Ending, Output
from stack_serve.llm.proposer import ModelDrafts
from stack_serve.llm.sequence import Sequence

__all__ = ["Continuation", "Work"]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Continuation:
    """One of the `n` continuations of a request.

    Attributes:
      sequence, settings, ending: state used by the engine thread; `settings` are the words of `SlotState.settings`.
      matcher: position in the language of the constraint, used by the engine thread; None without a constraint.
      drafts: drafter of the sequence, used by the engine thread; None without speculation.
      output, has_ended: state used by the detokenization thread.
      work: state of the request.
    """

    sequence: Sequence
    settings: np.ndarray
    ending: Ending
    output: Output
    work: "Work"
    matcher: Matcher | None = None
    drafts: Drafts | ModelDrafts | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """A request, from `submit` to the last update.

    Attributes:
      request: request as submitted.
      receive: callback for the updates of the request.
      adapter: adapter shared by all continuations, or None.
      compiler: compiler of the constraint of the request; None without a constraint.
      waits: True if no continuation has started or ended yet.
      unfinished: number of continuations whose end has not been reported.
      submitted_s, started_s, first_token_s: times of submission, first step and first token on the clock of
        `time.monotonic()`; None if not reached yet.
      continuations: continuations of the request.
      prompt_logprobs: log-probabilities of each prompt token; entries are None if not requested or not yet computed.
      is_first_sent: True if an update of the first continuation was delivered, which has the prompt log-probabilities.
    """

    request: GenerationRequest
    receive: Callable[[GenerationUpdate], None]
    adapter: HostAdapter | None = None
    compiler: ConstraintCompiler | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    continuations: list[Continuation] = field(default_factory=list)
    unfinished: int = field(init=False)
    prompt_logprobs: list[TokenLogprob | None] = field(init=False)
    waits: bool = True
    started_s: float | None = None
    first_token_s: float | None = None
    is_first_sent: bool = False

    def __post_init__(self) -> None:
        self.unfinished = self.request.sampling.n
        self.prompt_logprobs = [None] * len(self.request.prompt)

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the request on the clock of `time.monotonic()`, or None."""
        return None if self.request.timeout_s is None else self.submitted_s + self.request.timeout_s

    def completed(self, update: GenerationUpdate, *, cached_tokens: int = 0) -> GenerationUpdate:
        """Fills in the fields of an update that belong to the whole request."""
        now_s = time.monotonic()
        if update.tokens and self.first_token_s is None:
            self.first_token_s = now_s
        update = replace(update, cached_tokens=cached_tokens)
        if update.index == 0 and not self.is_first_sent:
            self.is_first_sent = True
            # An aborted or failed request may end before its prompt is scored.
            is_computed = update.finish_reason in (None, "stop", "length")
            if self.request.sampling.prompt_logprobs is not None and is_computed:
                update = replace(update, prompt_logprobs=tuple(self.prompt_logprobs))
        if update.finish_reason is not None:
            times = RequestTimes(self.submitted_s, self.started_s, self.first_token_s, now_s)
            update = replace(update, times=times)
        return update

    def deliver(self, update: GenerationUpdate) -> None:
        """Passes an update to the receiver."""
        try:
            self.receive(update)
        except BaseException:  # Not even `CancelledError` or `SystemExit` may end the thread that serves all requests.
            _LOG.exception("The receiver of request %r failed", self.request.request_id)
