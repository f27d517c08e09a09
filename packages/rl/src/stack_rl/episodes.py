"""Players of episodes, in which an engine acts in environments turn by turn."""

import asyncio
import contextlib
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
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_rl.contracts import Action, Environment, Observation, StepResult, Tasks, Trajectory, Verdict
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.rewards.weighted import as_floats
from stack_rl.threads import DaemonExecutor

__all__ = [
    "AS_MODEL",
    "STEP_TIMEOUT_S",
    "Attempt",
    "Episode",
    "EventLoop",
    "OnFailure",
    "Player",
    "PolicySampling",
    "failure_message",
    "joined",
    "sampling_for",
    "within",
]

OnFailure = Literal["stop", "drop"]
"""Handling of an episode whose environment or reward fails: "stop" the run, or "drop" and count the episode."""


STEP_TIMEOUT_S: Final = 300.0
"""Default time limit of an environment step in seconds."""

_FAREWELL_S = 5.0  # extra time for coroutines to handle their own timeout or cancellation
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt:
    """An episode to be played; a group consists of several attempts at one task."""

    group: int
    task: int
    held_out: bool = False


@dataclass(frozen=True)
class PolicySampling:
    """Sampling settings of the policy, named and defined as in `SamplingParams`; the defaults sample from the model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def is_narrowed(self) -> bool:
        """Whether tokens may be excluded from sampling; trajectories then store the candidates."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def is_penalized(self) -> bool:
        """True if the logits depend on earlier tokens."""
        return self.penalties != (1.0, 0.0, 0.0)


AS_MODEL: Final = PolicySampling()
"""Settings that sample from the model's own distribution."""


@dataclass
class Episode:
    """A running episode; lists have one entry per token."""

    attempt: Attempt
    environment: Environment
    observation: Observation | None = None
    action: Action | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    verdict: Verdict | None = None
    parsed: str | None = None
    is_truncated: bool = False
    is_cut: bool = False
    limit_tokens: int = 0
    action_starts: list[int] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def begin(self, observation: Observation, seq_tokens: int) -> None:
        """Appends the prompt.

        Raises:
          ValueError: the prompt leaves no room for an action.
        """
        self.show(observation, seq_tokens)
        if self.observation is None:
            raise ValueError(f"no room for an action in data.seq_tokens: {seq_tokens}")

    def show(self, observation: Observation | None, seq_tokens: int) -> None:
        """Appends an observation. If it leaves no room for an action, the episode ends as truncated."""
        self.observation = observation
        if observation is None:
            return
        if len(self.tokens) + len(observation.tokens) >= seq_tokens:  # an action needs at least one more token
            self.observation, self.is_truncated = None, True
            return
        count = len(observation.tokens)
        self.tokens += observation.tokens
        self.sampled += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.candidates += [()] * count
        self.rewards += [0.0] * count

    def act(self, update: GenerationUpdate, seq_tokens: int) -> None:
        """Appends the policy's action."""
        assert self.observation is not None and update.logprobs is not None and update.finish_reason is not None
        count = len(update.tokens)
        self.limit_tokens = sum(self.sampled) + min(self.observation.max_tokens, seq_tokens - len(self.tokens))
        self.action_starts.append(len(self.tokens))
        self.tokens += update.tokens
        self.sampled += [True] * count
        self.logprobs += [each.logprob for each in update.logprobs]
        self.versions += update.weights_versions
        self.candidates += update.candidates or [()] * count
        self.rewards += [0.0] * count
        # An action that reaches its own `max_tokens` is complete; a shorter one was cut by `data.seq_tokens`.
        self.is_cut = update.finish_reason == "length"
        self.is_truncated = self.is_cut and count < self.observation.max_tokens
        self.action = Action(tokens=update.tokens, finish_reason=update.finish_reason)

    def take(self, result: StepResult, seq_tokens: int) -> None:
        reward = float(result.reward)  # sums of NumPy half-precision numbers would stay in half precision
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}; it must be finite")
        # Before `show` appends the observation: the reward belongs to the last token of the action.
        self.rewards[-1] += reward
        if result.verdict is not None:
            self.verdict, self.parsed = result.verdict, result.parsed
        self.facts |= as_floats(result.facts)
        self.show(result.observation, seq_tokens)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            group=self.attempt.group,
            task=self.attempt.task,
            tokens=np.asarray(self.tokens, np.int32),
            sampled=np.asarray(self.sampled, bool),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            rewards=np.asarray(self.rewards, np.float32),
            verdict=self.verdict,
            parsed=self.parsed,
            is_truncated=self.is_truncated,
            is_cut=self.is_cut,
            limit_tokens=self.limit_tokens,
            action_starts=tuple(self.action_starts),
            facts=self.facts,
            candidates=_flat(self.candidates),
        )


def _flat(candidates: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Flattens candidates to the arrays of a `Trajectory`; None if all tokens lack them."""
    counts = np.asarray([len(each) for each in candidates], np.int32)
    return (counts, np.asarray([token for each in candidates for token in each], np.int32)) if counts.any() else None


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
    ) -> None:
        self._policy_sampling = policy_sampling
        self._tasks, self._engine = tasks, engine
        self._seq_tokens, self._on_failure, self._timeout_s = seq_tokens, on_failure, timeout_s
        self._loop = EventLoop()
        self._requests = 0

    def play(self, attempts: Sequence[Attempt], *, seed: Sequence[int], greedy: bool) -> list[Trajectory | None]:
        """Plays every attempt to its end.

        Args:
          attempts: episodes to play.
          seed: non-negative numbers that seed the sampling.
          greedy: use greedy decoding.

        Returns:
          A trajectory for each attempt; None for attempts that failed and are dropped.

        Raises:
          EnvironmentFailed: an environment or a reward failed, and failures stop the run.
        """
        made = [self._tasks.episode(each.task, held_out=each.held_out) for each in attempts]
        episodes = [Episode(*pair) for pair in zip(attempts, made, strict=True)]
        try:
            self._together(episodes, self._reset)
            for turn in range(self._seq_tokens):
                acting = [place for place, each in enumerate(episodes) if each.observation is not None]
                if not acting:
                    break
                # One seed per episode, running or not, so the seeds do not depend on when other episodes end.
                seeds = np.random.default_rng([*seed, turn]).integers(1 << 62, size=len(episodes))
                self._act([episodes[place] for place in acting], seeds[acting], greedy=greedy)
                self._together([episodes[place] for place in acting], self._step)
        finally:
            closing = [each.environment.close() for each in episodes]
            self._loop.run(closing, timeout_s=self._timeout_s + _FAREWELL_S)
        return [each.trajectory() if each.failure is None else None for each in episodes]

    async def _reset(self, episode: Episode) -> None:
        episode.begin(await episode.environment.reset(), self._seq_tokens)

    async def _step(self, episode: Episode) -> None:
        assert episode.action is not None
        episode.take(await episode.environment.step(episode.action), self._seq_tokens)

    def _act(self, acting: Sequence[Episode], seeds: np.ndarray, *, greedy: bool) -> None:
        """Takes one action in each episode."""
        submitted = deque[tuple[Episode, str]]()
        for episode, seed in zip(acting, seeds, strict=True):
            policy_sampling = None if greedy else self._policy_sampling
            sampling = sampling_for(episode, policy_sampling, seed=int(seed), seq_tokens=self._seq_tokens)
            name = f"rollout-{self._requests}"
            self._requests += 1
            request = GenerationRequest(request_id=name, prompt=tuple(episode.tokens), sampling=sampling)
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
                if self._on_failure == "stop" and not isinstance(error, Unchecked):
                    raise EnvironmentFailed(failure_message(episode, self._tasks)) from error

        self._loop.run([guarded(each) for each in episodes], timeout_s=self._timeout_s + _FAREWELL_S)


def sampling_for(
    episode: Episode, policy_sampling: PolicySampling | None, *, seed: int, seq_tokens: int
) -> SamplingParams:
    """Returns the sampling parameters of an episode's next action; without `policy_sampling`, it is greedy."""
    observation = episode.observation
    assert observation is not None
    tokens = {
        "max_tokens": min(observation.max_tokens, seq_tokens - len(episode.tokens)),
        "stop_tokens": observation.stop_tokens,
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
        finish_reason=last.finish_reason,
    )


class EventLoop:
    """An event loop on its own thread, because the caller's thread may already run one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor())  # used by `asyncio.to_thread` in user environments
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

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
