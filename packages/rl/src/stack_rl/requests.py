"""Requests of an episode that plays itself, and the record of the answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError, StackError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_rl.branches import Branch, join_experts
from stack_rl.sampling import PolicySampling

__all__ = ["EpisodeRequests", "Receive", "Send"]

Receive: TypeAlias = Callable[[GenerationUpdate], None]
Send: TypeAlias = Callable[[GenerationRequest, Receive], None]
"""Submits a request to the engine. The receiver must be called on the event loop."""

OnAnswer: TypeAlias = Callable[[Sequence[int], GenerationUpdate], None]
"""Called with a prompt and a complete answer."""


@dataclass
class _Pending:
    """A request in progress.

    Attributes:
      requested_tokens: maximum number of tokens per answer before it is limited by the episode's room.
      reserved_tokens: room that the answers may take.
      branch: branch that the first answer extends; None begins a new one.
      is_trained: whether the loss can reproduce the distribution of the answers.
      updates: updates of each unfinished continuation.
      is_sent: False while the engine's queue has no room.
    """

    request: GenerationRequest
    receive: Receive
    on_answer: OnAnswer
    wants_logprobs: bool
    requested_tokens: int
    reserved_tokens: int
    branch: Branch | None
    is_trained: bool
    updates: dict[int, list[GenerationUpdate]]
    is_sent: bool = False


@dataclass
class EpisodeRequests:
    """Concurrent requests of one episode to the policy, on one event loop.

    An answer extends the branch whose tokens are a prefix of its prompt, or begins a new branch. All branches together
    have at most `seq_tokens` tokens.

    The settings of a request are kept, except that its log-probabilities are of the sampling distribution, and that a
    missing seed is the episode's. An answer is trained if the loss can reproduce its distribution: the request may have
    its own temperature above 0, and everything else as in `sampling`, without a bias, a constraint or a minimum number
    of tokens. Other answers are observations.

    Attributes:
      engine: engine of the policy.
      send: submits a request to it.
      sampling: sampling settings of the run.
      is_greedy: whether answers are greedy, whatever their request sets.
      seed: returns the seed of a request by its number.
      seq_tokens: maximum number of tokens of all branches.
      experts: request the experts of each token.
      branches: the answers so far.
      answers, untrained_answers: numbers of answers.
      is_truncated, is_cut, limit_tokens: as in `Trajectory`.
      failure: error of the engine, which is not the episode's.
    """

    engine: Engine
    send: Send
    sampling: PolicySampling
    is_greedy: bool
    seed: Callable[[int], int]
    seq_tokens: int
    experts: bool = False
    branches: list[Branch] = field(default_factory=list)
    answers: int = 0
    untrained_answers: int = 0
    is_truncated: bool = False
    is_cut: bool = False
    limit_tokens: int = 0
    failure: StackError | None = None
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _requests: int = 0
    _is_closed: bool = False

    def submit(
        self,
        request: GenerationRequest,
        receive: Receive,
        *,
        max_tokens: int,
        on_answer: OnAnswer,
    ) -> None:
        """Sends a request.

        Args:
          request: the request.
          receive: called with each update on the event loop.
          max_tokens: maximum number of tokens per answer; the request may have a lower one.
          on_answer: called with the prompt and each complete answer, before `receive`.

        Raises:
          GenerationError: the engine cannot serve the request, or the episode has no room for it.
          EngineStopped: the engine was closed or failed.
        """
        pending = self._admit(request, receive, max_tokens, on_answer)
        self._send(pending)
        self._pending[request.request_id] = pending
        self._requests += 1
        self._changed.set()

    def abort(self, request_id: str) -> None:
        """Ends a request and records the tokens sampled so far."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.is_sent:
            self.engine.abort(request_id)
        elif pending is not None:
            self._end(request_id)

    def close(self) -> None:
        """Aborts all requests; later answers are not recorded."""
        self._is_closed = True
        for each in tuple(self._pending):
            self.abort(each)

    async def wait_for_request(self, playing: "asyncio.Task[Any]") -> None:
        """Waits until a request is pending or the episode has ended."""
        await self._wait(lambda: bool(self._pending), playing)

    async def wait_for_answers(self, playing: "asyncio.Task[Any]") -> None:
        """Waits until no request is pending or the episode has ended."""
        await self._wait(lambda: not self._pending, playing)

    async def _wait(self, condition: Callable[[], bool], playing: "asyncio.Task[Any]") -> None:
        notify = lambda task: self._changed.set()
        playing.add_done_callback(notify)
        try:
            while not condition() and not playing.done():
                self._changed.clear()
                await self._changed.wait()
        finally:
            playing.remove_done_callback(notify)

    def _admit(self, request: GenerationRequest, receive: Receive, max_tokens: int, on_answer: OnAnswer) -> _Pending:
        """Reserves room for the answers of a request.

        Raises:
          GenerationError: there is no room for a token of each answer.
        """
        requested, prompt = request.sampling, request.prompt
        reserved = {id(each.branch) for each in self._pending.values()}
        continued = [each for each in self.branches if id(each) not in reserved and _continues(request, each)]
        branch = max(continued, key=lambda each: len(each.tokens), default=None)
        used = sum(len(each.tokens) for each in self.branches)
        used += sum(each.reserved_tokens for each in self._pending.values())
        # Each further answer to the same prompt needs another branch.
        context = len(prompt) * requested.n - (0 if branch is None else len(branch.tokens))
        requested_tokens = min(max_tokens, requested.max_tokens or max_tokens)
        count = min(requested_tokens, (self.seq_tokens - used - context) // requested.n)
        if count < 1:
            raise GenerationError(
                # OpenAI's words, by which clients recognize the error.
                f"This model's maximum context length is {self.seq_tokens} tokens for all conversations of an episode, "
                f"with their answers. However, with your messages they have {used + context} tokens.",
                parameter="prompt",
                code="context_length_exceeded",
            )
        sampling = self._sampling(requested, count)
        return _Pending(
            replace(request, sampling=sampling),
            receive,
            on_answer,
            requested.logprobs is not None,
            requested_tokens,
            context + count * requested.n,
            branch,
            self.is_greedy or _is_trained(sampling, self.sampling),
            {index: [] for index in range(requested.n)},
        )

    def _sampling(self, requested: SamplingParams, max_tokens: int) -> SamplingParams:
        seed = self.seed(self._requests) if requested.seed is None else requested.seed
        changes: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "logprobs": requested.logprobs or 0}
        changes["experts"] = self.experts
        if self.is_greedy:
            return replace(requested, **(changes | vars(PolicySampling()) | {"temperature": 0.0}))
        return replace(requested, **changes, logprobs_of="processed", candidates=self.sampling.is_narrowed)

    def _send(self, pending: _Pending) -> None:
        request = pending.request

        def again() -> None:
            if request.request_id not in self._pending:
                return
            try:
                self._send(pending)
            except StackError as error:
                self.failure = error
                self._end(request.request_id)

        try:
            self.send(request, lambda update: self._receive(request.request_id, update))
            pending.is_sent = True
        except EngineBusy as busy:
            asyncio.get_running_loop().call_later(busy.retry_after_s, again)
        except EngineStopped as stopped:
            self.failure = stopped
            raise

    def _receive(self, request_id: str, update: GenerationUpdate) -> None:
        pending = self._pending.get(request_id)
        if pending is None or self._is_closed:
            self._pending.pop(request_id, None)
            return
        pending.updates[update.index].append(update)
        if update.finish_reason is not None:
            answer = _joined(pending.updates.pop(update.index))
            if update.finish_reason == "error":
                reason = update.error or "no reason given"
                self.failure = StackError(f"The engine ended a rollout with 'error': {reason}.")
            elif answer.tokens:
                self._record(pending, answer)
                pending.on_answer(pending.request.prompt, answer)
            if not pending.updates:
                del self._pending[request_id]
                self._changed.set()
        logprobs = update.logprobs if pending.wants_logprobs else None
        pending.receive(replace(update, candidates=None, experts=None, logprobs=logprobs))

    def _record(self, pending: _Pending, answer: GenerationUpdate) -> None:
        """Adds an answer to the branch that its prompt continues."""
        branch, prompt, sampling = pending.branch, pending.request.prompt, pending.request.sampling
        pending.branch = None
        before = len(prompt) if branch is None else len(prompt) - len(branch.tokens)
        pending.reserved_tokens -= before + (sampling.max_tokens or 0)
        if branch is None:
            self.branches.append(branch := Branch())
        first = len(branch.tokens)
        images = [image for image in pending.request.images if image.start >= first]
        branch.observe(prompt[first:], [replace(image, start=image.start - first) for image in images])
        self.answers += 1
        if pending.is_trained:
            sampled = sum(sum(each.sampled) for each in self.branches)
            self.limit_tokens = sampled + (sampling.max_tokens or 0)
            branch.act(answer, None if self.is_greedy else sampling.temperature)
        else:
            self.untrained_answers += 1
            branch.observe(answer.tokens)
        self.is_cut = answer.finish_reason == "length"
        self.is_truncated = self.is_cut and len(answer.tokens) < pending.requested_tokens

    def _end(self, request_id: str) -> None:
        """Ends a request that the engine does not have."""
        pending = self._pending.pop(request_id)
        self._changed.set()
        for index in pending.updates:
            pending.receive(GenerationUpdate(request_id=request_id, index=index, finish_reason="abort"))


def _continues(request: GenerationRequest, branch: Branch) -> bool:
    """Returns whether the tokens and images of a branch begin a prompt."""
    prompt, count = request.prompt, len(branch.tokens)
    images = [(each.start, each.digest) for each in request.images if each.start < count]
    is_same = images == [(each.start, each.digest) for each in branch.images]
    return is_same and count <= len(prompt) and list(prompt[:count]) == branch.tokens


def _is_trained(sampling: SamplingParams, run: PolicySampling) -> bool:
    """Returns whether the loss, which has the run's settings and the temperature, can reproduce a distribution."""
    own = {name: getattr(sampling, name) for name in vars(run) if name != "temperature"}
    is_changed = bool(sampling.logit_bias or sampling.logits_processors or sampling.constraint or sampling.min_tokens)
    return sampling.temperature > 0 and not is_changed and own == {name: getattr(run, name) for name in own}


def _joined(updates: Sequence[GenerationUpdate]) -> GenerationUpdate:
    """Concatenates the tokens of one continuation's updates."""
    candidates = tuple(part for each in updates for part in each.candidates or ())
    return GenerationUpdate(
        request_id=updates[-1].request_id,
        tokens=tuple(token for each in updates for token in each.tokens),
        weights_versions=tuple(version for each in updates for version in each.weights_versions),
        logprobs=tuple(part for each in updates for part in each.logprobs or ()),
        candidates=candidates or None,
        experts=join_experts(updates),
        finish_reason=updates[-1].finish_reason,
        stop_reason=updates[-1].stop_reason,
    )
