"""Where the groups of a batch come from: drawn when it is asked for, or ahead of it while the policy trains."""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stack_core.contracts.environments import Tasks, Trajectory
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.episodes import Attempt, Player
from stack_rl.groups import Group, Ledger
from stack_rl.pacing import Pacing
from stack_rl.rollout_journal import RolloutJournal

__all__ = ["AheadSupply", "Supply", "TogetherSupply", "Weights", "task_of"]

_TRAINING = 0


@dataclass(frozen=True)
class Weights:
    """The weights that the engine has: their version, and their digest, which is waited for where it is read."""

    version: int
    _digest: Any

    @property
    def digest(self) -> str:
        return "".join(f"{int(each):08x}" for each in np.asarray(self._digest))


class Supply(Protocol):
    """Groups for batches; what it gives is written down before."""

    def advance(self, weights: Weights) -> None:
        """Learns that the engine has new weights."""
        ...

    def take(self, weights: Weights) -> list[Group]:
        """The groups of the next batch, which nothing has used."""
        ...

    def close(self) -> None: ...


@dataclass
class Rounds:
    """What every supply has.

    Attributes:
      groups, group_size: tasks in a batch, and attempts at each.
      seed: of the order of tasks and of the draws.
    """

    tasks: Tasks
    groups: int
    group_size: int
    seed: int
    ledger: Ledger
    journal: RolloutJournal | None

    def attempts(self, number: int) -> list[Attempt]:
        task = task_of(number, self.tasks, self.seed)
        return [Attempt(number, task) for _ in range(self.group_size)]

    def write(self, groups: Sequence[Group]) -> None:
        if self.journal is not None:
            self.journal.add(groups)

    def recorded(self, weights: Weights) -> dict[int, Group]:
        """What waits in the journal and was drawn by weights of this course."""
        if self.journal is None:
            return {}
        usable = self.journal.usable(weights.version, weights.digest)
        return {number: self.journal.recorded[number] for number in sorted(usable)}


@dataclass
class TogetherSupply:
    """Draws a batch when it is asked for, all episodes together: a function of its number and of the weights."""

    rounds: Rounds
    player: Player

    def advance(self, weights: Weights) -> None: ...

    def take(self, weights: Weights) -> list[Group]:
        rounds, unused = self.rounds, self.rounds.ledger.unused()
        numbers = [next(unused) for _ in range(rounds.groups)]
        recorded = rounds.recorded(weights)
        if all(number in recorded for number in numbers):
            return [recorded[number] for number in numbers]
        attempts = [attempt for number in numbers for attempt in rounds.attempts(number)]
        seed = (rounds.seed, _TRAINING, rounds.ledger.batches)
        found = self.player.play(attempts, seed=seed, greedy=False)
        size = rounds.group_size
        parts = [found[first : first + size] for first in range(0, len(found), size)]
        groups = [Group(*pair) for pair in zip(numbers, *_stamps(weights, len(numbers)), parts, strict=True)]
        rounds.write(groups)
        return groups

    def close(self) -> None: ...


def _stamps(weights: Weights, count: int) -> tuple[list[int], list[str]]:
    return [weights.version] * count, [weights.digest] * count


@dataclass
class AheadSupply:
    """Draws groups while the policy trains, at most `pacing.max_staleness` versions ahead of their use."""

    rounds: Rounds
    player: ConcurrentPlayer
    pacing: Pacing
    _arrived: "queue.SimpleQueue[Group | Exception]" = field(default_factory=queue.SimpleQueue)
    _done: dict[int, Group] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _is_running: bool = False

    def advance(self, weights: Weights) -> None:
        if self._is_running:
            self._dispatch(weights)

    def take(self, weights: Weights) -> list[Group]:
        """Waits for the groups of the next batch.

        Raises:
          EnvironmentFailed: an episode failed, and failures stop the run.
        """
        if not self._is_running:
            self._resume(weights)
        while (numbers := self.pacing.ready(weights.version)) is None:
            arrived = self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            self._done[arrived.number] = arrived
            self.pacing.complete(arrived.number)
        self.pacing.use(numbers)
        self._begun.difference_update(numbers)
        return [self._done.pop(number) for number in numbers]

    def close(self) -> None:
        self.player.close()

    def _resume(self, weights: Weights) -> None:
        """Takes up what waits in the journal, and dispatches anew what had been dispatched and left nothing."""
        self._is_running = True
        for number, group in self.rounds.recorded(weights).items():
            self._begun.add(number)
            self._done[number] = group
            self.pacing.dispatch(number, group.version)
            self.pacing.complete(number)
        self._dispatch(weights)

    def _dispatch(self, weights: Weights) -> None:
        unused = (number for number in self.rounds.ledger.unused() if number not in self._begun)
        for _ in range(self.pacing.admitted()):
            number = next(unused)
            self._begun.add(number)
            self.pacing.dispatch(number, weights.version)
            self.player.begin(self.rounds.attempts(number), self._writer(number, weights), self._arrived.put)

    def _writer(self, number: int, weights: Weights) -> Callable[[list[Trajectory | None]], None]:
        def write(trajectories: list[Trajectory | None]) -> None:
            group = Group(number, weights.version, weights.digest, trajectories)
            self.rounds.write([group])
            self._arrived.put(group)

        return write


def task_of(group: int, tasks: Tasks, seed: int) -> int:
    """The task of a group: all tasks in an order of their own in each epoch."""
    if tasks.training is None:
        return group
    epoch, place = divmod(group, tasks.training)
    return int(np.random.default_rng([seed, epoch]).permutation(tasks.training)[place])
