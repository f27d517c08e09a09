"""Asynchronous player of groups, in which each episode proceeds independently of the others."""

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, EngineStopped, EnvironmentFailed
from stack_core.abi.generation import GenerationRequest, GenerationUpdate
from stack_rl.contracts import PlaysItself, Tasks, Trajectory
from stack_rl.episodes import (
    Attempt,
    Episode,
    EventLoop,
    OnFailure,
    failure_message,
    joined,
    sampling_for,
    within,
)
from stack_rl.requests import EpisodeRequests, Receive
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.sampling import PolicySampling

__all__ = ["ConcurrentPlayer"]


class ConcurrentPlayer:
    """Plays groups in the background.

    The sampling seed of each action depends on the run's seed, the group, the attempt and the turn, but not on
    concurrent episodes. The tokens of an episode may come from several versions of the weights, which are recorded per
    token.

    Args:
      tasks: tasks of the environment.
      engine: engine that generates actions.
      seq_tokens: maximum number of tokens per episode, including prompts and observations.
      seed: seed of the sampling.
      on_failure: handling of an episode whose environment or reward fails.
      timeout_s: time limit of each environment step in seconds.
      policy_sampling: sampling settings of the policy.
      experts: request the experts of each token, which the engine must report.
    """

    def __init__(
        self,
        tasks: Tasks,
        engine: Engine,
        *,
        seq_tokens: int,
        seed: int,
        on_failure: OnFailure,
        timeout_s: float,
        policy_sampling: PolicySampling,
        experts: bool = False,
    ) -> None:
        self._policy_sampling, self._experts = policy_sampling, experts
        self._tasks, self._engine, self._seed = tasks, engine, seed
        self._seq_tokens, self._on_failure, self._timeout_s = seq_tokens, on_failure, timeout_s
        self._loop = EventLoop()
        self._requests = itertools.count()
        # Episodes that wait for room in the engine's queue, in order. Used on the event loop only.
        self._queued: deque[asyncio.Future[None]] = deque()

    def begin(
        self,
        attempts: Sequence[Attempt],
        on_trajectories: Callable[[list[Trajectory | None]], object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Starts playing a group.

        Args:
          attempts: the group's attempts.
          on_trajectories: called on the event loop with the trajectories, None for dropped attempts; must not block.
          on_failure: called on the event loop with the error if failures stop the run.
        """

        async def group() -> None:
            playing = [asyncio.ensure_future(self._play(attempt, place)) for place, attempt in enumerate(attempts)]
            try:
                on_trajectories(list(await asyncio.gather(*playing)))
            except Exception as error:  # raised again on the thread that requests batches
                # After the first exception, `gather` does not cancel the remaining episodes.
                for each in playing:
                    each.cancel()
                on_failure(error)

        self._loop.begin(group())

    def close(self) -> None:
        """Stops all running episodes."""
        self._loop.close()

    async def _play(self, attempt: Attempt, place: int) -> Trajectory | None:
        episode = Episode(attempt, self._tasks.episode(attempt.task))
        try:
            await self._turns(episode, place)
        except EngineStopped:  # no failure of the environment, which may be dropped
            raise
        except Exception as error:  # Environments are user code and may raise any exception.
            episode.failure = f"{type(error).__name__}: {error}"
            if self._on_failure == "stop" and not isinstance(error, Unchecked):
                raise EnvironmentFailed(failure_message(episode, self._tasks)) from error
        finally:
            await episode.close()
        return None if episode.failure else episode.trajectory()

    async def _turns(self, episode: Episode, place: int) -> None:
        environment, limit_s = episode.environment, self._timeout_s
        if isinstance(environment, PlaysItself):
            await self._watch(episode, place)
            return
        episode.begin(await within(environment.reset(), limit_s), self._seq_tokens)
        for turn in itertools.count():
            if episode.observation is None:
                return
            seed = self._action_seed(episode, place, turn)
            episode.act(await self._act(episode, seed), self._seq_tokens)
            assert episode.action is not None
            episode.take(await within(environment.step(episode.action), limit_s), self._seq_tokens)

    def _action_seed(self, episode: Episode, place: int, turn: int) -> int:
        return int(np.random.default_rng([self._seed, episode.attempt.group, place, turn]).integers(1 << 62))

    async def _watch(self, episode: Episode, place: int) -> None:
        """Lets an episode play itself, with a time limit between its requests."""
        loop = asyncio.get_running_loop()

        def send(request: GenerationRequest, receive: Receive) -> None:
            def arrive(update: GenerationUpdate) -> None:
                with contextlib.suppress(RuntimeError):  # the run has ended and its event loop is closed
                    loop.call_soon_threadsafe(receive, update)

            self._engine.submit(request, arrive)

        seeds = functools.partial(self._action_seed, episode, place)
        settings = self._policy_sampling, False, seeds, self._seq_tokens, self._experts
        requests = EpisodeRequests(self._engine, send, *settings)
        playing = episode.play_itself(requests)
        while not playing.done():
            await within(requests.wait_for_request(playing), self._timeout_s)
            await requests.wait_for_answers(playing)
        if requests.failure is not None:
            self._engine.stats()  # raises if the engine itself has failed, and not only a request
        episode.finish(self._seq_tokens)

    async def _act(self, episode: Episode, seed: int) -> GenerationUpdate:
        """Requests one action from the engine, which answers on its own thread."""
        loop, name = asyncio.get_running_loop(), f"group-{episode.attempt.group}-{next(self._requests)}"
        ended, updates = loop.create_future(), list[GenerationUpdate]()

        def arrive(update: GenerationUpdate) -> None:
            updates.append(update)
            # The future is already done if the episode was cancelled.
            if update.finish_reason is not None and not ended.done():
                ended.set_result(None)
            if len(updates) == 1 or update.finish_reason is not None:  # it has left the engine's queue, or its place
                self._admit_next()

        def receive(update: GenerationUpdate) -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended and its event loop is closed
                loop.call_soon_threadsafe(arrive, update)

        settings = {"seed": seed, "seq_tokens": self._seq_tokens, "experts": self._experts}
        sampling = sampling_for(episode, self._policy_sampling, **settings)
        request = episode.request(name, sampling)
        while True:
            try:
                self._engine.submit(request, receive)
                break
            except EngineBusy as busy:
                await self._wait_for_room(busy.retry_after_s)
        await ended
        if updates[-1].finish_reason == "error":
            self._engine.stats()  # raises if the engine itself has failed, and not only this request
        return joined(updates)

    async def _wait_for_room(self, retry_after_s: float) -> None:
        """Waits until a request has begun or finished, or for `retry_after_s`: the engine may have other callers."""
        room = asyncio.get_running_loop().create_future()
        self._queued.append(room)
        try:
            await asyncio.wait([room], timeout=retry_after_s)
        finally:
            if not room.done():
                self._queued.remove(room)
                room.cancel()

    def _admit_next(self) -> None:
        """Lets the episode that has waited longest submit its request again."""
        if self._queued:
            self._queued.popleft().set_result(None)
