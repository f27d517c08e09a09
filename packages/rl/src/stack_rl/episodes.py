"""Players of episodes, in which an engine acts in environments turn by turn."""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import numpy as np

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, EnvironmentFailed, StackError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, PromptImage, SamplingParams
from stack_core.runtime.spans import record_span, spans_recorded
from stack_rl.branches import Branch, join_experts, laid_out
from stack_rl.contracts import Action, Environment, Observation, PlaysItself, StepResult, Tasks, Trajectory, Verdict
from stack_rl.requests import EpisodeRequests, Receive
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.rewards.weighted import as_floats
from stack_rl.sampling import AS_MODEL, PolicySampling
from stack_rl.threads import DaemonExecutor

__all__ = [
    "STEP_TIMEOUT_S",
    "Attempt",
    "Episode",
    "EventLoop",
    "OnFailure",
    "Player",
    "failure_message",
    "joined",
    "sampling_for",
    "within",
]

OnFailure = Literal["stop", "drop"]
"""Handling of an episode whose environment or reward fails: "stop" the run, or "drop" and count the episode."""


STEP_TIMEOUT_S: Final = 300.0
"""Default time limit of an environment step in seconds."""

_POLL_S = 0.02
_FAREWELL_S = 5.0  # extra time for coroutines to handle their own timeout or cancellation
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt:
    """An episode to be played; a group consists of several attempts at one task."""

    group: int
    task: int
    held_out: bool = False


@dataclass
class Episode:
    """A running episode.

    Attributes:
      branches: record of its tokens; a single branch, unless the episode plays itself.
      playing: task of an episode that plays itself.
      requests: requests of such an episode.
      started_s: start on the clock of `time.monotonic()`.
    """

    attempt: Attempt
    environment: Environment | PlaysItself
    observation: Observation | None = None
    action: Action | None = None
    branches: list[Branch] = field(default_factory=lambda: [Branch()])
    verdict: Verdict | None = None
    parsed: str | None = None
    is_truncated: bool = False
    is_cut: bool = False
    limit_tokens: int = 0
    facts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    playing: "asyncio.Task[StepResult] | None" = None
    requests: EpisodeRequests | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return (
            self.branches[0].tokens if len(self.branches) == 1 else [t for each in self.branches for t in each.tokens]
        )

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Images of the tokens of an episode with a single branch."""
        return tuple(self.branches[0].images)

    def begin(self, observation: Observation, seq_tokens: int) -> None:
        """Appends the prompt.

        Raises:
          ValueError: the prompt leaves no room for an action.
        """
        self.show(observation, seq_tokens)
        if self.observation is None:
            shown = sum(image.tokens for image in observation.images)
            of_images = f", whose prompt of {len(observation.tokens)} has {shown} of images" if shown else ""
            raise ValueError(f"no room for an action in data.seq_tokens: {seq_tokens}{of_images}")

    def show(self, observation: Observation | None, seq_tokens: int) -> None:
        """Appends an observation. If it leaves no room for an action, the episode ends as truncated."""
        self.observation = observation
        if observation is None:
            return
        if len(self.tokens) + len(observation.tokens) >= seq_tokens:  # an action needs at least one more token
            self.observation, self.is_truncated = None, True
            return
        self.branches[0].observe(observation.tokens, observation.images)

    def request(self, name: str, sampling: SamplingParams) -> GenerationRequest:
        """Returns the request of the next action."""
        return GenerationRequest(request_id=name, prompt=tuple(self.tokens), sampling=sampling, images=self.images)

    def act(self, update: GenerationUpdate, seq_tokens: int) -> None:
        """Appends the policy's action."""
        assert self.observation is not None and update.finish_reason is not None
        (branch,), count = self.branches, len(update.tokens)
        self.limit_tokens = sum(branch.sampled) + min(self.observation.max_tokens, seq_tokens - len(branch.tokens))
        branch.act(update)
        # An action that reaches its own `max_tokens` is complete; a shorter one was cut by `data.seq_tokens`.
        self.is_cut = update.finish_reason == "length"
        self.is_truncated = self.is_cut and count < self.observation.max_tokens
        self.action = Action(tokens=update.tokens, finish_reason=update.finish_reason)

    def take(self, result: StepResult, seq_tokens: int) -> None:
        reward = float(result.reward)  # sums of NumPy half-precision numbers would stay in half precision
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}; it must be finite")
        # Before `show` appends the observation: the reward belongs to the last token of the action. With several
        # branches it belongs to the last action in their order, because credit goes to earlier tokens of the row.
        last = next(each for each in reversed(self.branches) if each.action_starts)
        last.rewards[np.flatnonzero(last.sampled)[-1]] += reward
        if result.verdict is not None:
            self.verdict, self.parsed = result.verdict, result.parsed
        self.facts |= as_floats(result.facts)
        self.show(result.observation, seq_tokens)

    def play_itself(self, requests: EpisodeRequests) -> "asyncio.Task[StepResult]":
        """Starts an episode that plays itself; called on the event loop."""
        assert isinstance(self.environment, PlaysItself)
        self.requests, self.branches = requests, requests.branches
        self.playing = asyncio.ensure_future(self.environment.play(requests))
        return self.playing

    def finish(self, seq_tokens: int) -> None:
        """Takes the result of an episode that has played itself.

        Raises:
          ValueError: none of its answers can be trained.
          Exception: the episode or the engine failed.
        """
        assert self.playing is not None and self.requests is not None
        requests = self.requests
        self.end_requests()
        if requests.failure is not None:
            raise requests.failure
        if self.playing.cancelled():
            raise ValueError("its task was cancelled")
        result = self.playing.result()
        if not requests.answers:
            raise ValueError(f"no room for an answer in data.seq_tokens: {seq_tokens}")
        if requests.answers == requests.untrained_answers:
            raise ValueError(
                f"none of its {requests.answers} answers can be trained, because each request is greedy, has a "
                "constraint, a bias or min_tokens, or changes sampling settings other than the temperature"
            )
        counts = {"turns": requests.answers, "branches": len(requests.branches)}
        self.facts |= as_floats({**counts, "untrained_answers": requests.untrained_answers})
        self.is_truncated, self.is_cut = requests.is_truncated, requests.is_cut
        self.limit_tokens = requests.limit_tokens
        self.take(result, seq_tokens)

    def end_requests(self) -> None:
        """Ends the requests of an episode that plays itself."""
        if self.requests is not None:
            self.requests.close()
            self.requests = None

    async def close(self) -> None:
        """Closes the environment, and ends everything that the episode has started."""
        self.end_requests()
        if self.playing is not None:
            self.playing.cancel()
        if spans_recorded():
            record_span(
                "rollout",
                time.monotonic() - self.started_s,
                group=self.attempt.group,
                task=self.attempt.task,
                turns=sum(len(branch.action_starts) for branch in self.branches),
                tokens=len(self.tokens),
                reward=float(sum(sum(branch.rewards) for branch in self.branches)),
                failure=self.failure,
            )
        await self.environment.close()

    def trajectory(self) -> Trajectory:
        return Trajectory(
            group=self.attempt.group,
            task=self.attempt.task,
            verdict=self.verdict,
            parsed=self.parsed,
            is_truncated=self.is_truncated,
            is_cut=self.is_cut,
            limit_tokens=self.limit_tokens,
            facts=self.facts,
            **laid_out(self.branches),
        )


class Player:
    """Plays episodes of `tasks` with an engine, all of them in lockstep.

    In each turn the engine acts in every running episode, then every environment steps. The engine's requests are
    therefore a function of the attempts, the seed and the weights.

    Args:
      tasks: tasks of the environment.
      engine: engine that generates actions.
      seq_tokens: maximum number of tokens per episode, including prompts and observations.
      on_failure: handling of an episode whose environment or reward fails.
      timeout_s: time limit of each environment step in seconds; a longer step is a failure.
      policy_sampling: sampling settings if decoding is not greedy.
      experts: request the experts of each token, which the engine must report.
    """

    def __init__(
        self,
        tasks: Tasks,
        engine: Engine,
        *,
        seq_tokens: int,
        on_failure: OnFailure,
        timeout_s: float = STEP_TIMEOUT_S,
        policy_sampling: PolicySampling = AS_MODEL,
        experts: bool = False,
    ) -> None:
        self._policy_sampling, self._experts = policy_sampling, experts
        self._tasks, self._engine = tasks, engine
        self._seq_tokens, self._on_failure, self._timeout_s = seq_tokens, on_failure, timeout_s
        self._loop = EventLoop()
        self._requests = 0

    def play(
        self, attempts: Sequence[Attempt], *, seed: Sequence[int], greedy: bool, places: Sequence[int] | None = None
    ) -> list[Trajectory | None]:
        """Plays every attempt to its end.

        Args:
          attempts: episodes to play.
          seed: non-negative numbers that seed the sampling.
          greedy: use greedy decoding.
          places: ascending place of each attempt in a larger batch that several processes play, so that the sampling
            does not depend on their number; None for a complete batch.

        Returns:
          A trajectory for each attempt; None for attempts that failed and are dropped.

        Raises:
          EnvironmentFailed: an environment or a reward failed, and failures stop the run.
        """
        made = [self._tasks.episode(each.task, held_out=each.held_out) for each in attempts]
        episodes = [Episode(*pair) for pair in zip(attempts, made, strict=True)]
        sent = deque[tuple[str, Receive]]()
        numbers = np.arange(len(episodes)) if places is None else np.asarray(places, int)
        place_of = dict(zip(map(id, episodes), map(int, numbers), strict=True))

        def send(request: GenerationRequest, receive: Receive) -> None:
            # The receiver is not passed on: all episodes are answered in lockstep, see `_answer`.
            self._engine.submit(request)
            sent.append((request.request_id, receive))

        async def begin(episode: Episode) -> None:
            if not isinstance(episode.environment, PlaysItself):
                episode.begin(await episode.environment.reset(), self._seq_tokens)
                return
            seeds = lambda number: int(np.random.default_rng([*seed, place_of[id(episode)], number]).integers(1 << 62))
            settings = self._policy_sampling, greedy, seeds, self._seq_tokens, self._experts
            episode.play_itself(EpisodeRequests(self._engine, send, *settings))
            await self._step(episode)

        try:
            self._together(episodes, begin)
            for turn in itertools.count():
                acting = [place for place, each in enumerate(episodes) if each.observation is not None]
                playing = [each for each in episodes if each.requests is not None]
                if not acting and not playing and not sent:
                    break
                # One seed per episode, running or not, so the seeds do not depend on when other episodes end.
                seeds = np.random.default_rng([*seed, turn]).integers(1 << 62, size=numbers.max(initial=-1) + 1)
                self._act([episodes[place] for place in acting], seeds[numbers[acting]], greedy=greedy)
                if not acting and not sent:
                    time.sleep(_POLL_S)  # all requests wait for room in the engine's queue
                self._answer(sent)
                self._together([*(episodes[place] for place in acting), *playing], self._step)
        finally:
            closing = [each.close() for each in episodes]
            self._loop.run(closing, timeout_s=self._timeout_s + _FAREWELL_S)
        return [each.trajectory() if each.failure is None else None for each in episodes]

    async def _step(self, episode: Episode) -> None:
        """Steps an environment, or waits until an episode that plays itself needs an answer or has ended."""
        if not isinstance(episode.environment, PlaysItself):
            assert episode.action is not None
            episode.take(await episode.environment.step(episode.action), self._seq_tokens)
            return
        assert episode.playing is not None and episode.requests is not None
        await episode.requests.wait_for_request(episode.playing)
        if episode.playing.done():
            episode.finish(self._seq_tokens)

    def _answer(self, sent: "deque[tuple[str, Receive]]") -> None:
        """Answers the requests of episodes that play themselves."""
        while sent:
            name, receive = sent.popleft()
            for update in self._engine.stream(name):
                self._loop.call(receive, update)

    def _act(self, acting: Sequence[Episode], seeds: np.ndarray, *, greedy: bool) -> None:
        """Takes one action in each episode."""
        submitted = deque[tuple[Episode, str]]()
        for episode, seed in zip(acting, seeds, strict=True):
            policy_sampling = None if greedy else self._policy_sampling
            settings = {"seed": int(seed), "seq_tokens": self._seq_tokens, "experts": self._experts}
            sampling = sampling_for(episode, policy_sampling, **settings)
            name = f"rollout-{self._requests}"
            self._requests += 1
            request = episode.request(name, sampling)
            self._submit(request, submitted)
            submitted.append((episode, name))
        self._receive(submitted, count=len(submitted))

    def _submit(self, request: GenerationRequest, submitted: "deque[tuple[Episode, str]]") -> None:
        """Submits a request; if the engine's queue is full, receives answers to earlier requests first."""
        while True:
            try:
                return self._engine.submit(request)
            except EngineBusy as busy:
                if submitted:
                    self._receive(submitted, count=1)
                else:
                    time.sleep(busy.retry_after_s)

    def _receive(self, submitted: "deque[tuple[Episode, str]]", *, count: int) -> None:
        for _ in range(count):
            episode, name = submitted.popleft()
            episode.act(joined(list(self._engine.stream(name))), self._seq_tokens)

    def _together(self, episodes: Sequence[Episode], work: Callable[[Episode], Awaitable[None]]) -> None:
        """Runs the same coroutine for all episodes concurrently; a failure affects only its own episode."""

        async def guarded(episode: Episode) -> None:
            try:
                await within(work(episode), self._timeout_s)
            except Exception as error:  # Environments are user code and may raise any exception.
                episode.failure, episode.observation = f"{type(error).__name__}: {error}", None
                episode.end_requests()
                if self._on_failure == "stop" and not isinstance(error, Unchecked):
                    raise EnvironmentFailed(failure_message(episode, self._tasks)) from error

        self._loop.run([guarded(each) for each in episodes], timeout_s=self._timeout_s + _FAREWELL_S)


def sampling_for(
    episode: Episode, policy_sampling: PolicySampling | None, *, seed: int, seq_tokens: int, experts: bool = False
) -> SamplingParams:
    """Returns the sampling parameters of an episode's next action; without `policy_sampling`, it is greedy."""
    observation = episode.observation
    assert observation is not None
    tokens = {
        "max_tokens": min(observation.max_tokens, seq_tokens - len(episode.tokens)),
        "stop_tokens": observation.stop_tokens,
        "experts": experts,
    }
    if policy_sampling is None:
        return SamplingParams(**tokens, seed=seed, temperature=0.0, logprobs=0)
    drawn: dict[str, Any] = {**vars(policy_sampling), "candidates": policy_sampling.is_narrowed}
    # With "processed", log-probabilities refer to the processed distribution, from which the tokens are sampled.
    return SamplingParams(**tokens, **drawn, seed=seed, logprobs=0, logprobs_of="processed")


def failure_message(episode: Episode, tasks: Tasks) -> str:
    """Formats the error message of a failed episode."""
    attempt = episode.attempt
    return (
        f"The episode at {tasks.name(attempt.task, held_out=attempt.held_out)} failed: {episode.failure}. Its tokens "
        f"so far:\n  {tasks.text(tuple(episode.tokens))}\n"
        "Fix the environment or the reward, or drop and count such episodes by data.on_failure: drop."
    )


async def within(work: Awaitable[_T], timeout_s: float) -> _T:
    """Awaits a step of an environment with a time limit.

    Raises:
      EnvironmentFailed: the step exceeds the limit.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        # A TimeoutError that the environment itself raised is not this limit.
        if not limit.expired():
            raise
        raise EnvironmentFailed(f"no answer within data.step_timeout_s: {timeout_s:g}") from error


def joined(updates: Sequence[GenerationUpdate]) -> GenerationUpdate:
    """Concatenates the updates of one generation request.

    Raises:
      StackError: the engine aborted the request.
    """
    last = updates[-1]
    if last.finish_reason not in ("stop", "length"):
        raise StackError(f"The engine ended a rollout with {last.finish_reason!r}: {last.error or 'no reason given'}.")
    parts = [part for each in updates for part in each.logprobs or ()]
    candidates = tuple(part for each in updates for part in each.candidates or ())
    return GenerationUpdate(
        request_id=last.request_id,
        tokens=tuple(token for each in updates for token in each.tokens),
        weights_versions=tuple(version for each in updates for version in each.weights_versions),
        logprobs=tuple(parts),
        candidates=candidates or None,
        experts=join_experts(updates),
        finish_reason=last.finish_reason,
    )


class EventLoop:
    """An event loop on its own thread, because the caller's thread may already run one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor())  # used by `asyncio.to_thread` in user environments
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Calls a function on the event loop, after everything that was started before."""
        self._loop.call_soon_threadsafe(function, *args)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Sequence[Awaitable[Any]], *, timeout_s: float | None = None) -> None:
        """Awaits all; raises the first error after all have finished.

        Raises:
          EnvironmentFailed: they did not finish within `timeout_s`.
        """

        async def together() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        try:
            ended = self.begin(together()).result(timeout_s)
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"An environment or a reward has blocked the event loop for more than {timeout_s:g} s, and with it all "
                "episodes. A slow step must await, or run in a separate process."
            ) from error
        for each in ended:
            if isinstance(each, BaseException):
                raise each

    def close(self) -> None:
        """Cancels all running coroutines and ends the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(TimeoutError):  # a coroutine that ignores its cancellation ends with the process
            self.begin(end()).result(_FAREWELL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_FAREWELL_S)
        if not self._thread.is_alive():
            self._loop.close()
