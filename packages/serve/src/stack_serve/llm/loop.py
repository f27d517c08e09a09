"""Main loop of the engine thread: each turn plans and launches a step, then reads the tokens of the previous step.

A turn that speculates reads the previous step first, because drafts continue its tokens.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import FinishReason, GenerationRequest
from stack_core.ops.sampling.logprobs import TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled
from stack_core.runtime.spans import record_span, spans_recorded
from stack_serve.llm.compilations import count_thread_compilations
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler
from stack_serve.llm.dispatcher import End, OutputEvent, PromptScores, Tokens
from stack_serve.llm.drafting import Drafting
from stack_serve.llm.handover import ExportedPages, export_pages, import_pages
from stack_serve.llm.images import StepImages, images_of_rows, step_images
from stack_serve.llm.limits import Limits
from stack_serve.llm.masks import masks_of_drafts, masks_of_samples
from stack_serve.llm.new_weights import KeysOfOldWeights
from stack_serve.llm.output import GOES_ON, EndOfTokens
from stack_serve.llm.programs import ForwardResult, Programs, StepResult
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.scheduler import finish, forget_prefixes, recompute, record, reject, schedule
from stack_serve.llm.scheduler_state import Plan, Row, SchedulerState
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.work import Continuation, Work
from stack_serve.llm.work_factory import WorkFactory

__all__ = ["EngineLoop"]

# Bounds the duration of a launch, because new requests and updates of clients wait until it ends.
_MOST_REPEATED_S = 0.04
# A longer pause before a launch was not spent on its plan.
_MOST_PLANNED_S = 0.02


@dataclass(frozen=True)
class _StartedStep:
    """A step launched on the devices.

    Attributes:
      plan: rows of the step.
      version: version of the weights used by the step.
      result: results on the devices; a `ForwardResult` until the constrained rows are sampled.
      prompt_logprobs: log-probabilities of the token after each token of the step; None without such a request.
      started_s: launch time on the clock of `time.monotonic()`.
      drafts: drafts of each row that may be accepted; empty if no row has any. A constraint may shorten them.
      is_ahead: True if the step was launched before the previous one was read.
      drafting_s: time that the proposer took; None if it had to catch up, which is not measured.
    """

    plan: Plan
    version: int
    result: StepResult | ForwardResult
    prompt_logprobs: TokenLogprobs | None
    started_s: float
    drafts: list[tuple[int, ...]]
    is_ahead: bool
    drafting_s: float | None = 0.0


class EngineLoop:
    """State of an engine, to be modified by a single thread.

    Attributes:
      work_factory: creates the state of requests.
      stats: statistics after the last turn.
      done_waiting: number of continuations that have left the queue, because they or another of the same request
        started or ended.

    Args:
      checkpoint: model to serve.
      config: settings of the engine.
      limits: resolved sizes of the engine.
      programs: device state and programs.
      put: callback that delivers results to clients.
      proposer: model that drafts; None without one.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        config: EngineConfig,
        limits: Limits,
        programs: Programs,
        put: Callable[[list[OutputEvent]], None],
        proposer: Proposer | None = None,
    ) -> None:
        self._programs = programs
        sizes = {"max_tokens": limits.max_tokens, "pages": limits.pages, "image_rows": programs.image_rows}
        self._state = SchedulerState.of(config, **sizes, prefix_caching=limits.prefix_caching)
        self._arrived = 0
        self._arrivals: list[Sequence] = []
        self._continuations: dict[int, Continuation] = {}
        self._drafting: Drafting | None = None
        if config.speculation is not None:
            self._drafting = Drafting(
                config.speculation,
                self._state,
                self._continuations,
                buckets=programs.buckets,
                proposer=proposer,
                end_tokens=checkpoint.end_tokens,
            )
        self.work_factory = WorkFactory(checkpoint, config, limits, self._drafting)
        self._started: _StartedStep | None = None
        self._compiler: ConstraintCompiler | None = None
        self._put = put
        self._undelivered: list[OutputEvent] = []
        self.done_waiting = 0
        self.weights_version = 0
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

    def begin(self, work: Work) -> None:
        """Queues the continuations of a request for the next turn."""
        self._compiler = work.compiler or self._compiler
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
        self._leave_queue(work)
        self.flush()

    def stop(self, continuation: Continuation) -> None:
        """Drops a continuation whose end (stop text or deadline) was already reported to the client."""
        if continuation.sequence.id in self._continuations:
            self._drop(continuation)
            self._leave_queue(continuation.work)

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
        self.weights_version = self.weights_version + 1 if version is None else version
        self.forget_prefixes()
        if kv == "recompute":
            recompute(self._state)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache, whose pages are about to be freed or have keys of old weights."""
        forget_prefixes(self._state)
        if self._drafting is not None:
            self._drafting.forget()

    def export_pages(self, request: GenerationRequest, adapter: int | None) -> ExportedPages:
        """Launches copies of the cached pages of a prompt; see `handover`."""
        return export_pages(self._state, self._programs, request, adapter)

    def import_pages(self, request: GenerationRequest, adapter: int | None, exported: ExportedPages) -> None:
        """Adds pages of another engine to the prefix cache; see `handover`."""
        import_pages(self._state, self._programs, request, adapter, exported)

    def turn(self) -> None:
        """Launches the next step, then reads the previous one, to keep the devices busy."""
        speculates = self._drafting is not None and not self._arrivals and self._drafting.pays()
        if speculates or (self._started is not None and self._started.drafts):
            # The start of the next step depends on the number of accepted drafts.
            started, self._started = self._started, None
            if started is not None:
                self._read(started)
        arrivals, self._arrivals = self._arrivals, list[Sequence]()
        with jax.profiler.TraceAnnotation("plan"):
            drafts = self._drafting.choose() if self._drafting is not None and speculates else None
            rows = len(self._state.running) + len(arrivals)
            repeats = 1 if speculates or not self._programs.decodes(rows) else self._repeats
            plan = schedule(self._state, arrivals, repeats=repeats, drafts=drafts)
        # The next step is launched before the previous one is read: the devices compute while the host reads and plans.
        started = self._started
        self._started = self._start(plan, is_ahead=not speculates) if plan.rows else None
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

    def _start(self, plan: Plan, *, is_ahead: bool) -> _StartedStep:
        now_s = time.monotonic()
        for sequence in plan.admitted:
            continuation = self._continuations[sequence.id]
            self._leave_queue(continuation.work)
            # A preempted sequence is admitted again, but its request started only once.
            continuation.work.started_s = continuation.work.started_s or now_s
            if spans_recorded() and not sequence.preemptions:
                record_span(
                    "queue",
                    time.monotonic() - continuation.work.submitted_s,
                    request=sequence.request_id,
                    index=sequence.index,
                    prompt_tokens=sequence.prompt_tokens,
                    cached_tokens=sequence.cached_tokens,
                )
            assert sequence.slot is not None
            self._programs.admit(sequence.slot, sequence.tokens, continuation.settings)
        for sequence in plan.loading:
            adapter = self._continuations[sequence.id].work.adapter
            assert adapter is not None
            self._programs.load_adapter(sequence.adapter_slot, adapter)
        tables = self._state.block_tables[[row.slot for row in plan.rows]]
        rows = [row[1:] for row in plan.rows]
        result: StepResult | ForwardResult
        drafts, candidates = list[tuple[int, ...]](), self._reports_candidates(plan)
        drafting_s: float | None = 0.0
        if plan.drafts:
            assert self._drafting is not None
            tokens, drafts, drafting_s = self._drafting.draft(plan, tables)
            masks = self._masks_of_drafts(plan.rows, drafts)
            result = self._programs.verify(rows, tables, tokens, masks, candidates=candidates)
        elif any(row.samples and row.sequence.is_constrained for row in plan.rows):
            result = self._programs.forward(rows, tables, self._images(plan))
        else:
            result = self._programs.step(
                rows, tables, repeats=plan.repeats, candidates=candidates, images=self._images(plan)
            )
        # A step with drafts has no prompts.
        prompt_logprobs = None if plan.drafts else self._prompt_logprobs(plan.rows, result)
        return _StartedStep(plan, self.weights_version, result, prompt_logprobs, now_s, drafts, is_ahead, drafting_s)

    def _images(self, plan: Plan) -> StepImages | None:
        """Computes missing features of a step's images, and returns the places of their tokens."""
        images = images_of_rows(plan.rows)
        return step_images(plan.rows, self._programs.encode_images(images)) if images else None

    def _reports_candidates(self, plan: Plan) -> bool:
        """Returns whether a request of the step's rows, not yet ended, asks for candidates."""
        found = (self._continuations.get(row.sequence.id) for row in plan.rows)
        return any(each is not None and each.work.request.sampling.candidates for each in found)

    def _masks_of_drafts(self, rows: tuple[Row, ...], drafts: list[tuple[int, ...]]) -> np.ndarray | None:
        """Returns the masks of a step and shortens its drafts where a constraint ends; None without constraints."""
        continuations = [self._continuations[row.sequence.id] for row in rows]
        if self._compiler is None or not any(each.matcher for each in continuations):
            return None
        masks, ends = masks_of_drafts(self._compiler, continuations, drafts, [row.tokens for row in rows])
        self._end_each(ends)
        return masks

    def _sample(self, step: _StartedStep, forward: ForwardResult) -> _StartedStep:
        """Launches the sampling of a step with the masks of its constrained rows."""
        assert self._compiler is not None
        continuations = [self._continuations.get(step.plan.rows[place].sequence.id) for place in forward.places]
        with jax.profiler.TraceAnnotation("masks"):
            # A continuation that ended with the previous step has a row, too, whose token is dropped.
            masks, ends = masks_of_samples(self._compiler, continuations)
        self._end_each(ends)
        candidates = self._reports_candidates(step.plan)
        return replace(step, result=self._programs.sample(forward, masks, candidates=candidates))

    def _end_each(self, ends: list[End]) -> None:
        for end in ends:
            self._undelivered.append(end)
            self._drop(end.continuation)

    def _leave_queue(self, work: Work) -> None:
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
        begun_s = max(step.started_s, self._read_s)
        self._set_repeats(step)
        counts = [0] * len(step.plan.rows)
        if step.result.sampled is not None:
            counts = self._read_sampled(step, step.result.sampled)
        if spans_recorded():
            record_span(
                "engine_step",
                time.monotonic() - begun_s,
                rows=[
                    (row.sequence.request_id, row.sequence.index, row.prompt_tokens, count)
                    for row, count in zip(step.plan.rows, counts, strict=True)
                ],
            )

    def _read_sampled(self, step: _StartedStep, sampled: Sampled) -> list[int]:
        """Collects the tokens of a step, and returns the number of new tokens of each row."""
        tokens, finite = np.asarray(sampled.tokens), np.asarray(sampled.ok)
        figures: Any = None
        counts = list[int]()
        for row, index in self._generated(step, tokens):
            continuation = self._continuations.get(row.sequence.id)
            new, end, is_lost = self._record(row, continuation, tokens[index].tolist(), finite[index].tolist())
            counts.append(len(new))
            if continuation is None or not row.samples:
                continue
            if continuation.drafts is not None:
                # A draft that a constraint cuts is rejected.
                continuation.drafts.extend(new, drafted=row.samples - 1 if step.drafts else 0)
            sampling = continuation.work.request.sampling
            if sampling.logprobs is not None or sampling.candidates:
                # Copied once per step, and only if a row reports log-probabilities or candidates.
                figures = figures or _readable(sampled)
            self._undelivered.append(Tokens(continuation, new, step.version, end, figures, index))
            if is_lost:
                error = "The logits of all allowed tokens are NaN or infinite after this text."
                if sampling.logits_processors:
                    error += f" Logits processors of the request: {', '.join(sampling.logits_processors)}."
                self._undelivered.append(End(continuation, "error", error))
        return counts

    def _generated(self, step: _StartedStep, tokens: np.ndarray) -> Iterator[tuple[Row, tuple[int | slice, ...]]]:
        """Yields the rows of a step with the indices of their generated tokens in `tokens`; takes back other drafts."""
        first = 0
        for place, row in enumerate(step.plan.rows):
            if not step.drafts:
                yield row, (slice(row.samples), place)
                continue
            # A verification has one row of tokens: [1, tokens]. Tokens after the first that differs from its draft
            # continue a text that was not generated.
            drafted, found = step.drafts[place], tokens[0, first : first + row.samples].tolist()
            accepted = next((i for i, token in enumerate(drafted) if token != found[i]), len(drafted))
            reject(self._state, row, accepted=accepted)
            yield row, (0, slice(first, first + accepted + 1))
            first += row.tokens

    def _record(
        self, row: Row, continuation: Continuation | None, tokens: list[int], finite: list[bool]
    ) -> tuple[list[int], EndOfTokens, bool]:
        """Records the generated tokens of a row up to its end.

        Returns:
          The new tokens of the continuation, their end, and whether the logits of the next one were not finite.
        """
        new, end, is_lost = list[int](), GOES_ON, False
        for token, is_finite in zip(tokens, finite, strict=True):
            # Also for ended sequences, whose tokens in flight the scheduler counts.
            record(self._state, row.sequence, token)
            if continuation is None or row.sequence.ended:
                continue
            if is_finite:
                new.append(token)
                end = continuation.ending.push(token)
                if continuation.matcher is not None:
                    continuation.matcher.advance(token)
            else:
                is_lost = True
            if is_lost or end.reason is not None:
                self._drop(continuation)
        return new, end, is_lost

    def _set_repeats(self, step: _StartedStep) -> None:
        """Sets the steps per program to fill `_MOST_REPEATED_S`, estimated from the last step."""
        now_s = time.monotonic()
        # A step begins when it is launched or when the previous one ends, whichever is later.
        took_s = now_s - max(step.started_s, self._read_s)
        self._record_duration(step, now_s, took_s)
        self._read_s = now_s
        if step.drafts:
            return
        # The bound on the duration avoids a division by zero, and gives the maximum to very fast steps.
        fitting = _MOST_REPEATED_S * step.plan.repeats / max(took_s, _MOST_REPEATED_S / self._max_repeats)
        self._repeats = max(1, min(self._max_repeats, int(fitting)))

    def _record_duration(self, step: _StartedStep, now_s: float, took_s: float) -> None:
        if self._drafting is None or not step.plan.rows or any(row.samples == 0 for row in step.plan.rows):
            return
        speculation = self._drafting.speculation
        tokens = sum(row.tokens for row in step.plan.rows)
        if step.drafts:
            # From the end of the previous step, since the host plans a verification after it.
            took_s = now_s - max(self._read_s, step.started_s - _MOST_PLANNED_S)
            if step.drafting_s is not None:
                speculation.record_verification(tokens, took_s - step.drafting_s)
        elif all(row.tokens == row.samples for row in step.plan.rows):
            speculation.record_decoding(len(step.plan.rows), took_s / step.plan.repeats, is_ahead=step.is_ahead)

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
