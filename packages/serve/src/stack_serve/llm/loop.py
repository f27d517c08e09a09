"""Main loop of the engine thread: each turn plans and launches a step, then reads the tokens of the previous step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import FinishReason, GenerationRequest, GenerationUpdate
from stack_core.ops.sampling.logprobs import TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled, SamplingSettings
from stack_serve.llm.adapters import HostAdapter
from stack_serve.llm.compilations import count_thread_compilations
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler
from stack_serve.llm.dispatcher import End, OutputEvent, PromptScores, Tokens
from stack_serve.llm.limits import Limits
from stack_serve.llm.output import GOES_ON, Ending, Output
from stack_serve.llm.programs import ForwardResult, Programs, StepResult
from stack_serve.llm.scheduler import Plan, Row, SchedulerState, finish, forget_prefixes, recompute, record, schedule
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.work import Continuation, Work

__all__ = ["EngineLoop", "KeysOfOldWeights"]

KeysOfOldWeights = Literal["keep", "recompute", "abort"]
"""Policy for running requests when the weights are replaced (see `Engine.update_weights`)."""

_MOST_SEED = 2**32
# Bounds the duration of a launch, because new requests and updates of clients wait until it ends.
_MOST_REPEATED_S = 0.04


@dataclass(frozen=True)
class _StartedStep:
    """A step launched on the devices.

    Attributes:
      plan: rows of the step.
      version: version of the weights used by the step.
      result: device arrays with the result of the step; of the forward pass alone until constrained rows are sampled.
      prompt_logprobs: log-probabilities of the token after each token of the step; None without such a request.
      started_s: launch time on the clock of `time.monotonic()`.
    """

    plan: Plan
    version: int
    result: StepResult | ForwardResult
    prompt_logprobs: TokenLogprobs | None
    started_s: float


class EngineLoop:
    """State of an engine, to be modified by a single thread.

    Attributes:
      stats: statistics after the last turn.
      done_waiting: number of continuations that have left the queue, because they or another of the same request
        started or ended.

    Args:
      checkpoint: model to serve.
      config: settings of the engine.
      limits: resolved sizes of the engine.
      programs: device state and programs.
      put: callback that delivers results to clients.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        config: EngineConfig,
        limits: Limits,
        programs: Programs,
        put: Callable[[list[OutputEvent]], None],
    ) -> None:
        self._tokenizer, self._end_tokens = checkpoint.tokenizer, checkpoint.end_tokens
        self._limits = limits
        self._programs = programs
        self._state = SchedulerState.of(
            config, max_tokens=limits.max_tokens, pages=limits.pages, prefix_caching=limits.prefix_caching
        )
        self._seeds = np.random.default_rng(config.seed)
        self._arrived = 0
        self._arrivals: list[Sequence] = []
        self._continuations: dict[int, Continuation] = {}
        self._started: _StartedStep | None = None
        self._compiler: ConstraintCompiler | None = None
        self._put = put
        self._undelivered: list[OutputEvent] = []
        self.done_waiting = 0
        self._version = 0
        self._read_s = 0.0
        self._repeats, self._max_repeats = 1, config.decode_repeats
        self._compilations_before = 0
        self.stats = self._state.stats(compilations=0)

    def start(self) -> None:
        """Starts the count of compilations; the engine thread calls this before its first turn."""
        self._compilations_before = count_thread_compilations()

    @property
    def has_work(self) -> bool:
        """True if a continuation or a launched step is unfinished."""
        return bool(self._continuations) or self._started is not None

    def work(
        self,
        request: GenerationRequest,
        receive: Callable[[GenerationUpdate], None],
        adapter: HostAdapter | None = None,
        compiler: ConstraintCompiler | None = None,
    ) -> Work:
        """Creates the state of a request; any thread may call this.

        Args:
          compiler: compiler of the request's constraint, if it has one.
        """
        work = Work(request, receive, adapter)
        sampling = request.sampling
        # Client threads share the generator: NumPy's generators lock themselves.
        seed = int(self._seeds.integers(_MOST_SEED)) if sampling.seed is None else sampling.seed
        leader: Sequence | None = None
        for index in range(sampling.n):
            sequence = Sequence(
                id=-1,
                request_id=request.request_id,
                index=index,
                tokens=list(request.prompt),
                prompt_tokens=len(request.prompt),
                max_total_tokens=self._limits.total_tokens(request),
                priority=request.priority,
                arrival=-1,
                adapter=None if adapter is None else adapter.number,
                # Cached pages lack the hidden states from which the log-probabilities of a prompt are computed.
                cacheable=sampling.prompt_logprobs is None or index > 0,
                is_constrained=sampling.constraint is not None,
                leader=leader,
            )
            # The first continuation computes the prompt; the others wait for its pages (see the scheduler).
            leader = leader or sequence
            settings = SamplingSettings.row(
                sampling, seed=(seed, index), end_tokens=self._end_tokens, prompt_tokens=len(request.prompt)
            )
            max_tokens = sequence.max_total_tokens - sequence.prompt_tokens
            ending = Ending(sampling, end_tokens=self._end_tokens, max_tokens=max_tokens)
            output = Output(request, index, tokenizer=self._tokenizer)
            matcher = None
            if sampling.constraint is not None:
                assert compiler is not None
                self._compiler, matcher = compiler, compiler.matcher(sampling.constraint)
            work.continuations.append(Continuation(sequence, settings, ending, output, work, matcher))
        return work

    def begin(self, work: Work) -> None:
        """Queues the continuations of a request for the next turn."""
        for continuation in work.continuations:
            # Ids are the arrival numbers: unique, and equal in every run with the same order of requests.
            continuation.sequence.id = continuation.sequence.arrival = self._arrived
            # Numbered here, in the engine thread, so the order of turns does not depend on which client thread was
            # faster.
            self._arrived += 1
            self._arrivals.append(continuation.sequence)
            self._continuations[continuation.sequence.id] = continuation

    def end(self, work: Work, reason: FinishReason) -> None:
        """Ends the unfinished continuations of a request."""
        for continuation in work.continuations:
            if continuation.sequence.id in self._continuations:
                self._drop(continuation)
                self._undelivered.append(End(continuation, reason))
        self._waits_no_more(work)
        self.flush()

    def stop(self, continuation: Continuation) -> None:
        """Drops a continuation whose end (stop text or deadline) was already reported to the client."""
        if continuation.sequence.id in self._continuations:
            self._drop(continuation)
            self._waits_no_more(continuation.work)

    def update_weights(self, params: Any, *, version: int | None, kv: KeysOfOldWeights) -> None:
        """Replaces the parameters and clears the prefix cache; see `Engine`.

        Args:
          params: parameters returned by `Programs.place`.
        """
        if kv == "abort":
            # A set is a copy: `end` removes all continuations of a request from the dict.
            for work in {continuation.work for continuation in self._continuations.values()}:
                # A waiting request has computed nothing with the old weights.
                if not work.waits:
                    self.end(work, "abort")
        self._programs.use(params)
        self._version = self._version + 1 if version is None else version
        forget_prefixes(self._state)
        if kv == "recompute":
            recompute(self._state)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache, whose pages are about to be freed."""
        forget_prefixes(self._state)

    def turn(self) -> None:
        """Launches the next step, then reads the previous one, to keep the devices busy."""
        arrivals, self._arrivals = self._arrivals, list[Sequence]()
        with jax.profiler.TraceAnnotation("plan"):
            plan = schedule(self._state, arrivals, repeats=self._repeats)
        # The next step is launched before the previous one is read: the devices compute while the host reads and plans.
        started, self._started = self._started, self._start(plan) if plan.rows else None
        self.flush()
        if started is not None:
            self._read(started)
        # The masks need the tokens just read. Until here the devices have run the forward pass of the next step.
        if self._started is not None and isinstance(self._started.result, ForwardResult):
            self._started = self._sample(self._started, self._started.result)
        # Before the results are sent: a client with its last token may ask for statistics at once.
        self.stats = self._state.stats(compilations=count_thread_compilations() - self._compilations_before)
        # No launch follows, so nothing would send the results just read until the next request.
        if self._started is None:
            self.flush()

    def flush(self) -> None:
        """Sends the results. Called after the next launch, since the threads it wakes compete for the GIL."""
        if self._undelivered:
            events, self._undelivered = self._undelivered, list[OutputEvent]()
            self._put(events)

    def _start(self, plan: Plan) -> _StartedStep:
        now_s = time.monotonic()
        for sequence in plan.admitted:
            continuation = self._continuations[sequence.id]
            self._waits_no_more(continuation.work)
            # A preempted sequence is admitted again, but its request started only once.
            continuation.work.started_s = continuation.work.started_s or now_s
            assert sequence.slot is not None
            self._programs.admit(sequence.slot, sequence.tokens, continuation.settings)
        for sequence in plan.loading:
            adapter = self._continuations[sequence.id].work.adapter
            assert adapter is not None
            self._programs.load_adapter(sequence.adapter_slot, adapter)
        tables = self._state.block_tables[[row.slot for row in plan.rows]]
        rows = [row[1:] for row in plan.rows]
        result: StepResult | ForwardResult
        if any(row.samples and row.sequence.is_constrained for row in plan.rows):
            result = self._programs.forward(rows, tables)
        else:
            result = self._programs.step(rows, tables, repeats=plan.repeats)
        return _StartedStep(plan, self._version, result, self._prompt_logprobs(plan.rows, result), now_s)

    def _sample(self, step: _StartedStep, forward: ForwardResult) -> _StartedStep:
        """Launches the sampling of a step with the masks of its constrained rows."""
        assert self._compiler is not None
        continuations = [self._continuations.get(step.plan.rows[place].sequence.id) for place in forward.places]
        with jax.profiler.TraceAnnotation("masks"):
            # A continuation that ended with the previous step has a row, too, whose token is dropped.
            masks = self._compiler.masks([None if each is None else each.matcher for each in continuations])
        for mask, continuation in zip(masks, continuations, strict=True):
            end = None if continuation is None else self._end_without_token(continuation, mask)
            if continuation is not None and end is not None:
                self._undelivered.append(end)
                self._drop(continuation)
                mask[:] = -1
        return replace(step, result=self._programs.sample(forward, masks))

    def _end_without_token(self, continuation: Continuation, mask: np.ndarray) -> End | None:
        """Returns the end of a constrained continuation if it cannot continue, otherwise None."""
        if continuation.matcher is None:
            return None
        error = continuation.matcher.error
        if error is not None:
            return End(continuation, "error", f"The constraint cannot be followed after this text: {error}.")
        if continuation.ending.allows_end_token:
            return None
        # `ignore_eos`, `min_tokens` or the model rules out the end tokens, so a complete text ends without one.
        assert self._compiler is not None
        mask &= self._compiler.text_tokens
        return None if mask.any() else End(continuation, "stop")

    def _waits_no_more(self, work: Work) -> None:
        if work.waits:
            work.waits = False
            self.done_waiting += len(work.continuations)

    def _prompt_logprobs(self, rows: tuple[Row, ...], result: StepResult | ForwardResult) -> TokenLogprobs | None:
        if not any(self._needs_prompt_logprobs(row) for row in rows):
            return None
        targets: list[int] = []
        for row in rows:
            following = row.sequence.tokens[row.start + 1 : row.start + row.tokens + 1]
            # The last token of a prompt has no known successor; its score is not read.
            targets += following + [0] * (row.tokens - len(following))
        return self._programs.prompt_logprobs(result, targets)

    def _needs_prompt_logprobs(self, row: Row) -> bool:
        continuation = self._continuations[row.sequence.id]
        # All continuations of a request have the same prompt, so only the first one computes its log-probabilities.
        is_requested = continuation.work.request.sampling.prompt_logprobs is not None and row.sequence.index == 0
        return is_requested and row.start + 1 < row.sequence.prompt_tokens

    def _read(self, step: _StartedStep) -> None:
        """Waits for the tokens of a step and collects the results to be sent."""
        assert isinstance(step.result, StepResult)
        if step.prompt_logprobs is not None:
            self._read_prompts(step)
        # Also for steps without samples, whose duration `_set_repeats` measures.
        jax.block_until_ready((step.result.hidden, step.result.sampled))
        self._set_repeats(step)
        if step.result.sampled is not None:
            self._read_sampled(step, step.result.sampled)

    def _read_sampled(self, step: _StartedStep, sampled: Sampled) -> None:
        tokens, finite = np.asarray(sampled.tokens).tolist(), np.asarray(sampled.ok).tolist()
        figures: Any = None
        for place, row in enumerate(step.plan.rows):
            continuation = self._continuations.get(row.sequence.id)
            new, end, is_lost = list[int](), GOES_ON, False
            for turn in range(row.samples):
                token = tokens[turn][place]
                # Also for ended sequences, whose tokens in flight the scheduler counts.
                record(self._state, row.sequence, token)
                if continuation is None or row.sequence.ended:
                    continue
                if finite[turn][place]:
                    new.append(token)
                    end = continuation.ending.push(token)
                    if continuation.matcher is not None:
                        continuation.matcher.advance(token)
                else:
                    is_lost = True
                if is_lost or end.reason is not None:
                    self._drop(continuation)
            if continuation is None or not row.samples:
                continue
            if continuation.work.request.sampling.logprobs is not None:
                # Copied once per step, and only if a row reports log-probabilities.
                figures = figures or _readable(sampled)
            self._undelivered.append(Tokens(continuation, new, step.version, end, figures, (slice(len(new)), place)))
            if is_lost:
                error = "The logits of all allowed tokens are NaN or infinite after this text."
                self._undelivered.append(End(continuation, "error", error))

    def _set_repeats(self, step: _StartedStep) -> None:
        """Sets the steps per program to fill `_MOST_REPEATED_S`, estimated from the last step."""
        now_s = time.monotonic()
        # A step begins when it is launched or when the previous one ends, whichever is later.
        took_s = now_s - max(step.started_s, self._read_s)
        self._read_s = now_s
        # The bound on the duration avoids a division by zero, and gives the maximum to very fast steps.
        fitting = _MOST_REPEATED_S * step.plan.repeats / max(took_s, _MOST_REPEATED_S / self._max_repeats)
        self._repeats = max(1, min(self._max_repeats, int(fitting)))

    def _read_prompts(self, step: _StartedStep) -> None:
        figures = _readable(step.prompt_logprobs)
        place = 0
        for row in step.plan.rows:
            continuation = self._continuations.get(row.sequence.id)
            if continuation is not None and self._needs_prompt_logprobs(row):
                last = min(row.start + row.tokens + 1, row.sequence.prompt_tokens)
                index = slice(place, place + last - row.start - 1)
                self._undelivered.append(PromptScores(continuation, row.start + 1, figures, index))
            place += row.tokens

    def _drop(self, continuation: Continuation) -> None:
        del self._continuations[continuation.sequence.id]
        # The scheduler learns of arrivals in the next turn.
        if continuation.sequence in self._arrivals:
            self._arrivals.remove(continuation.sequence)
        else:
            finish(self._state, continuation.sequence)


def _readable(figures: Any) -> Any:
    """Copies the arrays to the host."""
    return jax.tree.map(np.asarray, figures)
