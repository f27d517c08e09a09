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
from stack_core.abi.generation import FinishReason, GenerationRequest, GenerationUpdate
from stack_core.ops.sampling.logprobs import TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled, SamplingSettings
from stack_core.runtime.spans import record_span, spans_recorded
from stack_serve.llm.adapters import HostAdapter
from stack_serve.llm.compilations import count_thread_compilations
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler, Matcher
from stack_serve.llm.dispatcher import End, OutputEvent, PromptScores, Tokens
from stack_serve.llm.drafts import Drafts
from stack_serve.llm.handover import ExportedPages, export_pages, import_pages
from stack_serve.llm.images import StepImages, images_of_rows, step_images
from stack_serve.llm.limits import Limits
from stack_serve.llm.new_weights import KeysOfOldWeights
from stack_serve.llm.output import GOES_ON, Ending, EndOfTokens, Output
from stack_serve.llm.programs import ForwardResult, Programs, StepResult
from stack_serve.llm.proposer import ModelDrafts, Proposer
from stack_serve.llm.scheduler import (
    Plan,
    Row,
    SchedulerState,
    finish,
    forget_prefixes,
    recompute,
    record,
    reject,
    schedule,
)
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.speculation import Speculation
from stack_serve.llm.work import Continuation, Work

__all__ = ["EngineLoop"]

_MOST_SEED = 2**32
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
      result: device arrays with the result of the step; of the forward pass alone until constrained rows are sampled.
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
        self._tokenizer, self._end_tokens = checkpoint.tokenizer, checkpoint.end_tokens
        self._limits = limits
        self._programs = programs
        sizes = {"max_tokens": limits.max_tokens, "pages": limits.pages, "image_rows": programs.image_rows}
        self._state = SchedulerState.of(config, **sizes, prefix_caching=limits.prefix_caching)
        self._drafting, self._proposer = config.speculation, proposer
        self._catches_up = False
        self._speculation: Speculation | None = None
        if config.speculation is not None:
            cost = None if proposer is None else proposer.cost
            self._speculation = Speculation(programs.buckets, config.speculation.tokens, cost)
        self._seeds = np.random.default_rng(config.seed)
        self._arrived = 0
        self._arrivals: list[Sequence] = []
        self._continuations: dict[int, Continuation] = {}
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
                images=request.images,
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
            drafts = None
            if self._proposer is not None:
                drafts = ModelDrafts(sequence, self._proposer.pair)
            elif self._drafting is not None:
                drafts = Drafts(self._drafting, request.prompt, sequence.max_total_tokens)
            work.continuations.append(Continuation(sequence, settings, ending, output, work, matcher, drafts))
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
        self.weights_version = self.weights_version + 1 if version is None else version
        self.forget_prefixes()
        if kv == "recompute":
            recompute(self._state)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache, whose pages are about to be freed or have keys of old weights."""
        forget_prefixes(self._state)
        if self._proposer is not None:
            self._proposer.forget(self._state.weights_version)

    def export_pages(self, request: GenerationRequest, adapter: int | None) -> ExportedPages:
        """Launches copies of the cached pages of a prompt; see `handover`."""
        return export_pages(self._state, self._programs, request, adapter)

    def import_pages(self, request: GenerationRequest, adapter: int | None, exported: ExportedPages) -> None:
        """Adds pages of another engine to the prefix cache; see `handover`."""
        import_pages(self._state, self._programs, request, adapter, exported)

    def turn(self) -> None:
        """Launches the next step, then reads the previous one, to keep the devices busy."""
        speculates = self._speculates()
        if speculates or (self._started is not None and self._started.drafts):
            # The start of the next step depends on the number of accepted drafts.
            started, self._started = self._started, None
            if started is not None:
                self._read(started)
        arrivals, self._arrivals = self._arrivals, list[Sequence]()
        with jax.profiler.TraceAnnotation("plan"):
            drafts = self._choose_drafts() if speculates else None
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

    def _speculates(self) -> bool:
        """Returns whether the next step should verify drafts, for which the step in flight is read first."""
        if self._speculation is None or self._arrivals or not self._state.running:
            return False
        if self._proposer is not None and self._proposer.programs.to_compile:
            return False
        # A step with prompts verifies no drafts.
        if any(sequence.total_tokens - sequence.computed_tokens > 1 for sequence in self._state.running):
            return False
        rows = [drafts for _, drafts in self._drafters()]
        return self._speculation.pays(rows, [self._available(each) for each in rows])

    def _drafters(self) -> Iterator[tuple[Continuation, Drafts | ModelDrafts]]:
        """Yields the running continuations with their drafters."""
        running = (self._continuations[sequence.id] for sequence in self._state.running)
        return ((continuation, continuation.drafts) for continuation in running if continuation.drafts is not None)

    def _available(self, drafts: Drafts | ModelDrafts) -> int:
        """Returns the maximum number of drafted tokens of a row."""
        assert self._speculation is not None
        if self._proposer is None or not isinstance(drafts, ModelDrafts):
            return self._speculation.tokens
        return min(self._speculation.tokens, self._proposer.room(drafts))

    def _choose_drafts(self) -> dict[int, tuple[int, ...]]:
        """Returns the drafts to verify in the next step by sequence id; the host knows all tokens.

        The tokens of a proposer are zeros until the step is planned, since its keys need the pages of the plan.
        """
        assert self._speculation is not None
        if self._proposer is not None:
            return self._choose_lengths(self._proposer, self._speculation)
        drafters = [(each, drafts) for each, drafts in self._drafters() if isinstance(drafts, Drafts)]
        drafted = [drafts.draft() for _, drafts in drafters]
        for place, (continuation, _) in enumerate(drafters):
            if continuation.matcher is not None:
                allowed = continuation.matcher.allowed(drafted[place], self._end_tokens)
                drafted[place] = drafted[place][:allowed]
        lengths = self._speculation.choose([drafts for _, drafts in drafters], list(map(len, drafted)))
        chosen = zip(drafters, drafted, lengths, strict=True)
        return {continuation.sequence.id: tokens[:length] for (continuation, _), tokens, length in chosen if length}

    def _choose_lengths(self, proposer: Proposer, speculation: Speculation) -> dict[int, tuple[int, ...]]:
        """Chooses the rows to draft with the proposer, and launches the computation of their missing keys."""
        rows = [drafts for _, drafts in self._drafters() if isinstance(drafts, ModelDrafts)]
        lengths = speculation.choose(rows, [self._available(each) for each in rows])
        chosen = [(each, length) for each, length in zip(rows, lengths, strict=True) if length]
        self._catches_up = proposer.catch_up(self._state.block_tables, [each for each, _ in chosen])
        return {each.sequence.id: (0,) * length for each, length in chosen if each.has_all_keys}

    def _start(self, plan: Plan, *, is_ahead: bool) -> _StartedStep:
        now_s = time.monotonic()
        for sequence in plan.admitted:
            continuation = self._continuations[sequence.id]
            self._waits_no_more(continuation.work)
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
        drafts, candidates = list(plan.drafts), self._reports_candidates(plan)
        drafting_s: float | None = 0.0
        if drafts and self._proposer is not None:
            drafts, drafting_s = self._propose(self._proposer, plan.rows, tables)
        if drafts:
            tokens = [
                token
                for row, drafted in zip(plan.rows, drafts, strict=True)
                for token in (row.sequence.tokens[-1], *drafted)
            ]
            if self._proposer is not None:
                # Only now, because the step computes rejected drafts, too.
                drafts = list(map(self._allowed, plan.rows, drafts))
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

    def _propose(
        self, proposer: Proposer, rows: tuple[Row, ...], tables: np.ndarray
    ) -> tuple[list[tuple[int, ...]], float | None]:
        """Returns the drafts of each row by the proposer, and the time that it took (see `_StartedStep`)."""
        started_s = time.monotonic()
        # Rows without drafts take part, too, if only the newest key is missing; it would be missing later.
        places = [
            (place, drafts)
            for place, row in enumerate(rows)
            if isinstance(drafts := self._continuations[row.sequence.id].drafts, ModelDrafts)
            and drafts.computed_tokens == row.start
        ]
        found = proposer.propose(
            tables[[place for place, _ in places]], [(rows[place], drafts) for place, drafts in places]
        )
        all_drafts: list[tuple[int, ...]] = [()] * len(rows)
        for (place, _), drafted in zip(places, found, strict=True):
            all_drafts[place] = drafted
        if self._catches_up or self._speculation is None:
            return all_drafts, None
        took_s = time.monotonic() - started_s
        self._speculation.record_drafting(len(places), max(row.tokens for row in rows), took_s)
        return all_drafts, took_s

    def _allowed(self, row: Row, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the first tokens of a draft that the constraint of a row allows."""
        matcher = self._continuations[row.sequence.id].matcher
        return drafted if matcher is None else drafted[: matcher.allowed(drafted, self._end_tokens)]

    def _images(self, plan: Plan) -> StepImages | None:
        """Computes missing features of a step's images, and returns the places of their tokens."""
        images = images_of_rows(plan.rows)
        return step_images(plan.rows, self._programs.encode_images(images)) if images else None

    def _reports_candidates(self, plan: Plan) -> bool:
        """Returns whether a request of the step's rows, not yet ended, asks for candidates."""
        found = (self._continuations.get(row.sequence.id) for row in plan.rows)
        return any(each is not None and each.work.request.sampling.candidates for each in found)

    def _masks_of_drafts(self, rows: tuple[Row, ...], drafts: list[tuple[int, ...]]) -> np.ndarray | None:
        """Computes the masks of all positions of a step with drafts; shortens drafts after which a constraint ends.

        Returns:
          int32[tokens, words]; None if no row is constrained.
        """
        continuations = [self._continuations[row.sequence.id] for row in rows]
        if self._compiler is None or not any(each.matcher for each in continuations):
            return None
        masks = list[np.ndarray]()
        for place, (row, continuation) in enumerate(zip(rows, continuations, strict=True)):
            found = list[np.ndarray]()
            if continuation.matcher is not None:
                found, end = self._masks_along(continuation, drafts[place])
                if end is not None and not found:
                    self._undelivered.append(end)
                    self._drop(continuation)
                # A token is sampled after the last accepted draft, too, and needs a mask.
                drafts[place] = drafts[place][: max(len(found) - 1, 0)]
            masks += [*found, *self._compiler.masks([None] * (row.tokens - len(found)))]
        return np.stack(masks)

    def _masks_along(self, continuation: Continuation, drafted: tuple[int, ...]) -> tuple[list[np.ndarray], End | None]:
        """Computes the masks before each drafted token and after the last, up to the end of the constraint."""
        assert self._compiler is not None and continuation.matcher is not None
        # A copy, because the limits of the parser may be reached after a draft that is rejected.
        matcher, masks = continuation.matcher.copy(), list[np.ndarray]()
        for ahead in range(len(drafted) + 1):
            if ahead:
                matcher.advance(drafted[ahead - 1])
            (mask,) = self._compiler.masks([matcher])
            end = self._end_without_token(continuation, matcher, mask, ahead=ahead)
            if end is not None:
                return masks, end
            masks.append(mask)
        return masks, None

    def _sample(self, step: _StartedStep, forward: ForwardResult) -> _StartedStep:
        """Launches the sampling of a step with the masks of its constrained rows."""
        assert self._compiler is not None
        continuations = [self._continuations.get(step.plan.rows[place].sequence.id) for place in forward.places]
        with jax.profiler.TraceAnnotation("masks"):
            # A continuation that ended with the previous step has a row, too, whose token is dropped.
            masks = self._compiler.masks([None if each is None else each.matcher for each in continuations])
        for mask, continuation in zip(masks, continuations, strict=True):
            if continuation is None or continuation.matcher is None:
                continue
            end = self._end_without_token(continuation, continuation.matcher, mask)
            if end is not None:
                self._undelivered.append(end)
                self._drop(continuation)
                mask[:] = -1
        candidates = self._reports_candidates(step.plan)
        return replace(step, result=self._programs.sample(forward, masks, candidates=candidates))

    def _end_without_token(
        self, continuation: Continuation, matcher: Matcher, mask: np.ndarray, *, ahead: int = 0
    ) -> End | None:
        """Returns the end of a constrained continuation if it cannot continue after `ahead` drafts, otherwise None.

        Args:
          matcher: position after the drafts.
          mask: tokens that it allows; end tokens are removed if they cannot end the continuation.
        """
        if matcher.error is not None:
            return End(continuation, "error", f"The constraint cannot be followed after this text: {matcher.error}.")
        if continuation.ending.allows_end_token(ahead=ahead):
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
        if self._speculation is None or not step.plan.rows or any(row.samples == 0 for row in step.plan.rows):
            return
        tokens = sum(row.tokens for row in step.plan.rows)
        if step.drafts:
            # From the end of the previous step, since the host plans a verification after it.
            took_s = now_s - max(self._read_s, step.started_s - _MOST_PLANNED_S)
            if step.drafting_s is not None:
                self._speculation.record_verification(tokens, took_s - step.drafting_s)
        elif all(row.tokens == row.samples for row in step.plan.rows):
            self._speculation.record_decoding(len(step.plan.rows), took_s / step.plan.repeats, is_ahead=step.is_ahead)

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
