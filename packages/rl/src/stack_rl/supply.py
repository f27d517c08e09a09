"""Sources of the groups of each batch: sampled on request, or ahead of use while the policy trains."""

import functools
import queue
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from stack_rl.choosing import choose_task
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.episodes import Attempt, Player
from stack_rl.groups import Group, Ledger
from stack_rl.pacing import Pacing
from stack_rl.rollout_journal import RolloutJournal
from stack_rl.share import Share

__all__ = ["AheadSupply", "Supply", "TogetherSupply", "Weights"]

# Second number of the sampling seed; held-out tasks have another, `_HELD_OUT` in `rollouts`.
_TRAINING = 0


@dataclass(frozen=True)
class Weights:
    """The engine's weights.

    Attributes:
      version: number of updates.
      settings: digest of the sampling settings, see `RolloutJournal.begin`.
    """

    version: int
    _digest: Any
    settings: str = ""

    @property
    def digest(self) -> str:
        """Digest of the settings and the weights; waits for the weights to be computed."""
        return self.settings + "".join(f"{int(each):08x}" for each in np.asarray(self._digest))


@runtime_checkable
class Supply(Protocol):
    """Source of groups for batches. Each process writes its own groups to its journal before it returns them."""

    def advance(self, weights: Weights) -> None:
        """Notifies the supply that the engine has new weights."""
        ...

    def take(self, weights: Weights) -> list[Group]:
        """Returns the unused groups of the next batch, of all processes; `trained_on` selects those for training."""
        ...

    def close(self) -> None: ...


@dataclass
class Rounds:
    """State shared by all supplies.

    Attributes:
      tasks: tasks of the environment.
      groups: number of tasks per batch.
      group_size: number of attempts at each task.
      seed: seed of the task order and of the sampling.
      ledger: groups used so far.
      journal: journal of the run; None without a run directory.
      refill_rounds: maximum number of extra groups per batch that replace flat ones, as a multiple of `groups`.
      share: groups that this process plays.
    """

    tasks: Tasks
    groups: int
    group_size: int
    seed: int
    ledger: Ledger
    journal: RolloutJournal | None
    refill_rounds: int = 0
    share: Share = field(default_factory=Share)
    _has_warned: bool = False

    def attempts(self, number: int) -> list[Attempt]:
        task = choose_task(number, self.tasks, self.ledger.memory, seed=self.seed)
        return [Attempt(number, task) for _ in range(self.group_size)]

    def write(self, groups: Sequence[Group]) -> None:
        if self.journal is not None:
            self.journal.add(groups)

    def says_why(self, groups: Sequence[Group]) -> None:
        """Warns, once per run, if a batch contains flat groups because too few others were found."""
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
            "Change them or the reward, or raise objective.refill_rounds or data.group_size. This warning appears "
            "once; the metrics flat_groups and drawn_groups show later cases.",
            stacklevel=2,
        )

    def recorded(self, weights: Weights) -> dict[int, Group]:
        """Returns the groups in the journal that this run's weights may have sampled, by number."""
        if self.journal is None:
            return {}
        usable = self.journal.usable(weights.version, weights.digest)
        return {number: self.journal.recorded[number] for number in sorted(usable)}


@dataclass
class TogetherSupply:
    """Samples each batch on request, with all episodes in lockstep; a function of the batch number and the weights."""

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
        """Returns the groups with these numbers, from the journal or newly sampled."""
        rounds, size = self.rounds, self.rounds.group_size
        own = [number for number in numbers if rounds.share.plays(number)]
        # All or none: the seed of an episode depends on its place in the round.
        if all(number in recorded for number in own):
            return rounds.share.gather([recorded[number] for number in own])
        attempts = [attempt for number in own for attempt in rounds.attempts(number)]
        places = [numbers.index(number) * size + attempt for number in own for attempt in range(size)]
        # Round 0 has the same seed with and without refills.
        seed = (rounds.seed, _TRAINING, rounds.ledger.batches, *([round_] if round_ else []))
        found = self.player.play(attempts, seed=seed, greedy=False, places=places)
        parts = [found[first : first + size] for first in range(0, len(found), size)]
        stamp = weights.version, weights.digest
        groups = [Group(number, *stamp, part, rounds.ledger.batches) for number, part in zip(own, parts, strict=True)]
        rounds.write(groups)
        return rounds.share.gather(groups)

    def close(self) -> None: ...


@dataclass
class AheadSupply:
    """Samples groups while the policy trains, at most `pacing.max_staleness` batches before their use.

    `pacing` has the groups of this process.
    """

    rounds: Rounds
    player: ConcurrentPlayer
    pacing: Pacing
    # Writes finished groups, in order. The event loop of the episodes would stop all of them, because the digest of a
    # group's weights is available only after the update before it, and the journal waits for the disk.
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "stack-rollout-writer"))
    # Filled by the writer and, with failures, by the event loop; only the trainer's thread uses the fields below.
    _arrived: "queue.SimpleQueue[Group | Exception]" = field(default_factory=queue.SimpleQueue)
    _done: dict[int, Group] = field(default_factory=dict)
    _aside: list[Group] = field(default_factory=list)  # flat groups that were replaced by newly dispatched ones
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
        while (numbers := self.pacing.ready(self.rounds.ledger.batches)) is None:
            arrived = self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            self._arrive(arrived)
            self._dispatch(weights)
        self.pacing.use(numbers)
        groups = [*(self._done.pop(number) for number in numbers), *self._aside]
        self._aside = []
        groups = self.rounds.share.gather(groups)
        # The caller's ledger lists these groups as used from now on.
        self._begun.difference_update(each.number for each in groups)
        if self.rounds.refill_rounds:
            self.rounds.says_why(groups)
        return groups

    def close(self) -> None:
        self.player.close()
        self._writer.shutdown()

    def _resume(self, weights: Weights) -> None:
        """Loads the journal's groups, and dispatches again the groups that had not finished."""
        self._is_running = True
        for number, group in self.rounds.recorded(weights).items():
            self._begun.add(number)
            self.pacing.dispatch(number, group.batch)
            self._arrive(group)
        self._dispatch(weights)

    def _arrive(self, group: Group) -> None:
        """Registers a finished group. A flat group is set aside and replaced, up to the refill limit of the batch."""
        if group.is_flat and len(self._aside) < self.rounds.refill_rounds * self.pacing.groups:
            # The group no longer counts as outstanding, so `_dispatch` starts another one in its place.
            self.pacing.use([group.number])
            self._aside.append(group)
            return
        self._done[group.number] = group
        self.pacing.complete(group.number)

    def _dispatch(self, weights: Weights) -> None:
        plays, begun = self.rounds.share.plays, self._begun
        unused = (number for number in self.rounds.ledger.unused() if plays(number) and number not in begun)
        for _ in range(self.pacing.admitted()):
            number = next(unused)
            self._begun.add(number)
            self.pacing.dispatch(number, self.rounds.ledger.batches)
            finish = functools.partial(self._writer.submit, self._write, number, weights, self.rounds.ledger.batches)
            self.player.begin(self.rounds.attempts(number), finish, self._arrived.put)

    def _write(self, number: int, weights: Weights, batch: int, trajectories: list[Trajectory | None]) -> None:
        try:
            group = Group(number, weights.version, weights.digest, trajectories, batch)
            self.rounds.write([group])
        except Exception as error:  # raised again on the trainer's thread
            self._arrived.put(error)
        else:
            self._arrived.put(group)
