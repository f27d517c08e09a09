"""Where the groups of a batch come from: drawn when it is asked for, or ahead of it while the policy trains."""

import queue
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.episodes import Attempt, Player
from stack_rl.groups import Group, Ledger
from stack_rl.pacing import Pacing
from stack_rl.rollout_journal import RolloutJournal

__all__ = ["AheadSupply", "Supply", "TogetherSupply", "Weights", "task_of"]

_TRAINING = 0


@dataclass(frozen=True)
class Weights:
    """The engine's weights.

    Attributes:
      settings: digest of the settings that it draws with, see `RolloutJournal.begin`.
    """

    version: int
    _digest: Any
    settings: str = ""

    @property
    def digest(self) -> str:
        """Digest of the settings and the weights; waits for the computation of the latter."""
        return self.settings + "".join(f"{int(each):08x}" for each in np.asarray(self._digest))


class Supply(Protocol):
    """Groups for batches; what it gives is written down before."""

    def advance(self, weights: Weights) -> None:
        """Learns that the engine has new weights."""
        ...

    def take(self, weights: Weights) -> list[Group]:
        """The groups of the next batch, which nothing has used; see `trained_on` for which of them it trains on."""
        ...

    def close(self) -> None: ...


@dataclass
class Rounds:
    """What every supply has.

    Attributes:
      groups, group_size: tasks in a batch, and attempts at each.
      seed: of the order of tasks and of the draws.
      refill_rounds: how many times as many groups as a batch trains on may be drawn besides, in place of flat ones.
    """

    tasks: Tasks
    groups: int
    group_size: int
    seed: int
    ledger: Ledger
    journal: RolloutJournal | None
    refill_rounds: int = 0
    _has_warned: bool = False

    def attempts(self, number: int) -> list[Attempt]:
        task = task_of(number, self.tasks, self.seed)
        return [Attempt(number, task) for _ in range(self.group_size)]

    def write(self, groups: Sequence[Group]) -> None:
        if self.journal is not None:
            self.journal.add(groups)

    def says_why(self, groups: Sequence[Group]) -> None:
        """Warns, once in a run, that flat groups stay in a batch, as too few others were found."""
        lacking = self.groups - sum(not each.is_flat for each in groups)
        if lacking <= 0 or self._has_warned:
            return
        self._has_warned = True
        rewards = Counter(each.rewards[0] if each.rewards else None for each in groups if each.is_flat)
        of_all = {each: "no attempt left" if each is None else f"a reward of {each:g} throughout" for each in rewards}
        found = ", ".join(f"{count} with {of_all[reward]}" for reward, count in rewards.most_common(4))
        warnings.warn(
            f"Batch {self.ledger.batches} has {lacking} of {self.groups} groups without variance, which teach nothing: "
            f"of {len(groups)} groups that were drawn, {found}. The tasks are too hard or too easy for this policy. "
            "Change them or the reward, or raise data.refill_rounds or data.group_size. This is said once; flat_groups "
            "and drawn_groups count what follows.",
            stacklevel=2,
        )

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
        recorded, groups, lacking = rounds.recorded(weights), list[Group](), rounds.groups
        for round_ in range(1 + rounds.refill_rounds):
            groups += self._round(round_, [next(unused) for _ in range(lacking)], recorded, weights)
            lacking = rounds.groups - sum(not each.is_flat for each in groups)
            if not lacking:
                break
        if rounds.refill_rounds:
            rounds.says_why(groups)
        return groups

    def _round(
        self, round_: int, numbers: Sequence[int], recorded: Mapping[int, Group], weights: Weights
    ) -> list[Group]:
        """Groups of these numbers, as they were recorded, or drawn together."""
        rounds = self.rounds
        if all(number in recorded for number in numbers):
            return [recorded[number] for number in numbers]
        attempts = [attempt for number in numbers for attempt in rounds.attempts(number)]
        seed = (rounds.seed, _TRAINING, rounds.ledger.batches, *([round_] if round_ else []))
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
    _aside: list[Group] = field(default_factory=list)  # flat ones, in whose place others were dispatched
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
            self._arrive(arrived)
            self._dispatch(weights)
        self.pacing.use(numbers)
        groups = [*(self._done.pop(number) for number in numbers), *self._aside]
        self._aside = []
        self._begun.difference_update(each.number for each in groups)
        if self.rounds.refill_rounds:
            self.rounds.says_why(groups)
        return groups

    def close(self) -> None:
        self.player.close()

    def _resume(self, weights: Weights) -> None:
        """Takes up what waits in the journal, and dispatches anew what had been dispatched and left nothing."""
        self._is_running = True
        for number, group in self.rounds.recorded(weights).items():
            self._begun.add(number)
            self.pacing.dispatch(number, group.version)
            self._arrive(group)
        self._dispatch(weights)

    def _arrive(self, group: Group) -> None:
        """Takes a group up; a flat one makes room for another, as long as the next batch has not set enough aside."""
        if group.is_flat and len(self._aside) < self.rounds.refill_rounds * self.rounds.groups:
            self.pacing.use([group.number])
            self._aside.append(group)
            return
        self._done[group.number] = group
        self.pacing.complete(group.number)

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
