"""What an engine's thread does, turn by turn: plan and start a step, then read the tokens of the one before."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stack_core.generation import FinishReason, GenerationRequest, GenerationUpdate, TokenLogprob
from stack_core.protocols import GenerativeCheckpoint
from stack_serve.llm.compilations import compilations_here
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.limits import Limits
from stack_serve.llm.logprobs import TokenLogprobs
from stack_serve.llm.output import Output
from stack_serve.llm.programs import Programs, StepResult
from stack_serve.llm.sampling import Sampled, SamplingSettings
from stack_serve.llm.scheduler import Plan, Row, SchedulerState, finish, forget_prefixes, record, schedule
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.work import Continuation, Work

__all__ = ["EngineLoop"]

_MOST_SEED = 2**32
_MOST_REPEATED_S = 0.04


@dataclass(frozen=True)
class _StartedStep:
    """A step that the devices were given.

    Attributes:
      prompt_logprobs: of the tokens that follow those of the step, if any row wants them.
      started_s: of `time.monotonic()`.
    """

    plan: Plan
    result: StepResult
    prompt_logprobs: TokenLogprobs | None
    started_s: float


class EngineLoop:
    """The state of an engine, which only one thread may change.

    Attributes:
      stats: as of the last turn.
    """

    def __init__(
        self, checkpoint: GenerativeCheckpoint, config: EngineConfig, limits: Limits, programs: Programs
    ) -> None:
        self._tokenizer, self._end_tokens = checkpoint.tokenizer, checkpoint.end_tokens
        self._limits = limits
        self._programs = programs
        self._state = SchedulerState.of(config, max_tokens=limits.max_tokens, pages=limits.pages)
        self._seeds = np.random.default_rng(config.seed)
        self._arrived = 0
        self._arrivals: list[Sequence] = []
        self._continuations: dict[int, Continuation] = {}
        self._with_deadline: set[Work] = set()
        self._started: _StartedStep | None = None
        self._untold: list[tuple[Continuation, GenerationUpdate]] = []
        self._read_s = 0.0
        self._repeats, self._most_repeats = 1, config.decode_repeats
        self._compilations_before = 0
        self.stats = self._state.stats(compilations=0)

    def start(self) -> None:
        """The thread that takes the turns calls it before the first; what is compiled from then on is counted."""
        self._compilations_before = compilations_here()

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._continuations) or self._started is not None

    def work(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None]) -> Work:
        """What is to be done for a request; any thread may ask, one at a time."""
        work = Work(request, receive)
        sampling = request.sampling
        seed = int(self._seeds.integers(_MOST_SEED)) if sampling.seed is None else sampling.seed
        leader: Sequence | None = None
        for index in range(sampling.n):
            sequence = Sequence(
                id=self._arrived,
                request_id=request.request_id,
                index=index,
                tokens=list(request.prompt),
                prompt_tokens=len(request.prompt),
                max_total_tokens=self._limits.total_tokens(request),
                priority=request.priority,
                arrival=self._arrived,
                cacheable=sampling.prompt_logprobs is None or index > 0,
                leader=leader,
            )
            leader = leader or sequence
            self._arrived += 1
            settings = SamplingSettings.row(
                sampling, seed=(seed, index), end_tokens=self._end_tokens, prompt_tokens=len(request.prompt)
            )
            output = Output(
                request,
                index,
                tokenizer=self._tokenizer,
                end_tokens=self._end_tokens,
                max_tokens=sequence.max_total_tokens - sequence.prompt_tokens,
            )
            work.unfinished[index] = Continuation(sequence, settings, output, work)
        return work

    def begin(self, work: Work) -> None:
        """Takes up a request."""
        for continuation in work.unfinished.values():
            self._arrivals.append(continuation.sequence)
            self._continuations[continuation.sequence.id] = continuation
        if work.deadline_s is not None:
            self._with_deadline.add(work)

    def end(self, work: Work, reason: FinishReason) -> None:
        """Ends what is left of a request that was begun."""
        self.tell()  # which ends those whose last token was read
        for continuation in list(work.unfinished.values()):
            self._end(continuation, reason)

    def update_weights(self, params: Any) -> None:
        """Replaces the parameters and forgets the pages that were kept for other requests."""
        self._programs.update_weights(params)
        forget_prefixes(self._state)

    def turn(self) -> None:
        """Starts the next step, and reads the one before, which the devices work on meanwhile."""
        self._end_overdue()
        arrivals, self._arrivals = self._arrivals, list[Sequence]()
        plan = schedule(self._state, arrivals, repeats=self._repeats)
        started, self._started = self._started, self._start(plan) if plan.rows else None
        self.tell()
        if started is not None:
            self._read(started)
        if self._started is None:
            self.tell()
        self.stats = self._state.stats(compilations=compilations_here() - self._compilations_before)

    def tell(self) -> None:
        """Passes on what was read: once the next step is started, for whom it wakes competes for Python's lock."""
        untold, self._untold = self._untold, list[tuple[Continuation, GenerationUpdate]]()
        for continuation, update in untold:
            continuation.work.tell(update, cached_tokens=continuation.sequence.cached_tokens)

    def _start(self, plan: Plan) -> _StartedStep:
        now_s = time.monotonic()
        for sequence in plan.admitted:
            continuation = self._continuations[sequence.id]
            continuation.work.started_s = continuation.work.started_s or now_s
            assert sequence.slot is not None
            self._programs.admit(sequence.slot, sequence.tokens, continuation.settings)
        tables = self._state.block_tables[[row.slot for row in plan.rows]]
        result = self._programs.step([row[1:] for row in plan.rows], tables, repeats=plan.repeats)
        return _StartedStep(plan, result, self._prompt_logprobs(plan.rows, result), now_s)

    def _prompt_logprobs(self, rows: tuple[Row, ...], result: StepResult) -> TokenLogprobs | None:
        if not any(self._wants_prompt(row) for row in rows):
            return None
        targets: list[int] = []
        for row in rows:
            following = row.sequence.tokens[row.start + 1 : row.start + row.tokens + 1]
            targets += following + [0] * (row.tokens - len(following))
        return self._programs.prompt_logprobs(result, targets)

    def _wants_prompt(self, row: Row) -> bool:
        continuation = self._continuations[row.sequence.id]
        wanted = continuation.work.request.sampling.prompt_logprobs is not None and row.sequence.index == 0
        return wanted and row.start + 1 < row.sequence.prompt_tokens

    def _read(self, step: _StartedStep) -> None:
        """Waits for a step's tokens and makes of them what is to be told."""
        if step.prompt_logprobs is not None:
            self._read_prompts(step)
        jax.block_until_ready((step.result.hidden, step.result.sampled))
        self._set_repeats(step)
        if step.result.sampled is not None:
            self._read_sampled(step.plan.rows, step.result.sampled)

    def _read_sampled(self, rows: tuple[Row, ...], sampled: Sampled) -> None:
        tokens, finite = np.asarray(sampled.tokens).tolist(), np.asarray(sampled.ok).tolist()
        logprobs: Any = None
        for place, row in enumerate(rows):
            for turn in range(row.samples):
                record(self._state, row.sequence, tokens[turn][place])
                continuation = self._continuations.get(row.sequence.id)
                if continuation is None:
                    continue
                if not finite[turn][place]:
                    self._end(continuation, "error", error="The model's logits are not finite after this text.")
                    continue
                wanted, logprob = continuation.work.request.sampling.logprobs, None
                if wanted is not None:
                    logprobs = logprobs or _readable(sampled)
                    logprob = _token_logprob(logprobs, (turn, place), wanted)
                self._push(continuation, tokens[turn][place], logprob)
            if row.samples:
                self._take(row.sequence)

    def _set_repeats(self, step: _StartedStep) -> None:
        """Lets as many steps follow each other in a program as take `_MOST_REPEATED_S`, going by the last one."""
        now_s = time.monotonic()
        took_s = now_s - max(step.started_s, self._read_s)
        self._read_s = now_s
        fitting = _MOST_REPEATED_S * step.plan.repeats / max(took_s, _MOST_REPEATED_S / self._most_repeats)
        self._repeats = max(1, min(self._most_repeats, int(fitting)))

    def _push(self, continuation: Continuation, token: int, logprob: TokenLogprob | None) -> None:
        try:
            has_ended = continuation.output.push(token, logprob)
        except Exception as error:  # Whatever a tokenizer raises concerns this request, and no other.
            self._untold.append((continuation, continuation.output.take()))
            self._end(continuation, "error", error=f"The text of token {token} cannot be made: {error}")
            return
        if has_ended:
            self._untold.append((continuation, continuation.output.take()))
            self._drop(continuation)

    def _take(self, sequence: Sequence) -> None:
        """What a step gave to a continuation that goes on, to be told at once."""
        continuation = self._continuations.get(sequence.id)
        if continuation is not None:
            self._untold.append((continuation, continuation.output.take()))

    def _read_prompts(self, step: _StartedStep) -> None:
        figures = _readable(step.prompt_logprobs)
        place = 0
        for row in step.plan.rows:
            continuation = self._continuations.get(row.sequence.id)
            if continuation is not None and self._wants_prompt(row):
                wanted = continuation.work.request.sampling.prompt_logprobs or 0
                known = range(row.start + 1, min(row.start + row.tokens + 1, row.sequence.prompt_tokens))
                for position in known:
                    found = _token_logprob(figures, (place + position - row.start - 1,), wanted)
                    continuation.work.prompt_logprobs[position] = found
            place += row.tokens

    def _end(self, continuation: Continuation, reason: FinishReason, *, error: str | None = None) -> None:
        """Ends a continuation for another reason than its tokens."""
        self._drop(continuation)
        self.tell()
        continuation.work.end(continuation, reason, error=error)

    def _drop(self, continuation: Continuation) -> None:
        del self._continuations[continuation.sequence.id]
        if continuation.sequence in self._arrivals:
            self._arrivals.remove(continuation.sequence)
        else:
            finish(self._state, continuation.sequence)

    def _end_overdue(self) -> None:
        if not self._with_deadline:
            return
        now_s = time.monotonic()
        for work in [work for work in self._with_deadline if not work.unfinished or work.is_overdue(now_s)]:
            self._with_deadline.remove(work)
            self.end(work, "deadline")


def _readable(figures: Any) -> Any:
    """On the host."""
    return jax.tree.map(np.asarray, figures)


def _token_logprob(figures: Any, place: tuple[int, ...], wanted: int) -> TokenLogprob:
    top_tokens, top_logprobs = (array[place][:wanted].tolist() for array in (figures.top_tokens, figures.top_logprobs))
    token, logprob, rank = (array[place].item() for array in (figures.tokens, figures.logprobs, figures.ranks))
    return TokenLogprob(token, logprob, rank, tuple(zip(top_tokens, top_logprobs, strict=True)))
