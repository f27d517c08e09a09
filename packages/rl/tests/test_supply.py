"""Batches of groups: others are drawn in place of flat ones, or it is said why not."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from stack_core.abi.errors import JournalError
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Trajectory
from stack_rl.episodes import Player
from stack_rl.groups import Group, Ledger, trained_on
from stack_rl.pacing import Pacing
from stack_rl.rollout_journal import RolloutJournal
from stack_rl.supply import AheadSupply, Rounds, TogetherSupply, Weights

WEIGHTS = Weights(3, np.zeros(1, np.uint32))


def trajectory(group: int, reward: float) -> Trajectory:
    one = np.ones(1, np.float32)
    return Trajectory(
        group=group,
        task=group,
        tokens=np.ones(1, np.int32),
        sampled=one > 0,
        logprobs=-one,
        versions=np.ones(1, np.int32),
        rewards=one * reward,
    )


class EndlessTasks:
    training, held_out = None, 0

    def episode(self, task: int, *, held_out: bool = False) -> Any:
        raise NotImplementedError

    def name(self, task: int, *, held_out: bool = False) -> str:
        raise NotImplementedError

    def text(self, tokens: tuple[int, ...]) -> str:
        raise NotImplementedError


class PlayerByRule(Player):
    """Plays attempts whose rewards are `rewards(group)`; notes which groups it played with which seed."""

    def __init__(self, rewards: Callable[[int], tuple[float | None, float | None]]) -> None:
        self._rewards, self.played = rewards, list[tuple[list[int], tuple[int, ...]]]()

    def play(
        self, attempts: Sequence[Any], *, seed: Sequence[int], greedy: bool, places: Sequence[int] | None = None
    ) -> list[Trajectory | None]:
        numbers = [each.group for each in attempts]
        self.played.append((sorted(set(numbers)), tuple(seed)))
        return [trajectory(n, r) if r is not None else None for n in sorted(set(numbers)) for r in self._rewards(n)]


class ConcurrentPlayerByRule(ConcurrentPlayer):
    """Plays at once what it is told to begin."""

    def __init__(self, rewards: Callable[[int], tuple[float, float]]) -> None:
        self._player = PlayerByRule(rewards)

    def begin(self, attempts: Sequence[Any], done: Any, failed: Any) -> None:
        done(self._player.play(attempts, seed=(), greedy=False))

    def close(self) -> None: ...


def every_third(number: int) -> tuple[float, float]:
    return (0.0, 1.0) if number % 3 == 2 else (0.0, 0.0)


def rounds(**options: Any) -> Rounds:
    return Rounds(EndlessTasks(), 4, 2, 0, Ledger(), journal=None, **options)


def test_flat_groups_are_replaced_until_the_batch_is_full_and_stay_used() -> None:
    player = PlayerByRule(every_third)
    supply = TogetherSupply(rounds(refill_rounds=8), player)
    groups = supply.take(WEIGHTS)
    assert [numbers for numbers, _ in player.played] == [[0, 1, 2, 3], [4, 5, 6], [7, 8], [9], [10], [11]]
    assert len({seed for _, seed in player.played}) == 6
    assert [each.number for each in trained_on(groups, 4)] == [2, 5, 8, 11]
    supply.rounds.ledger.use([each.number for each in groups])
    assert supply.rounds.ledger.frontier == 12


def test_without_rounds_a_batch_keeps_its_flat_groups_in_their_order() -> None:
    groups = TogetherSupply(rounds(), PlayerByRule(every_third)).take(WEIGHTS)
    assert [each.number for each in trained_on(groups, 4)] == [0, 1, 2, 3]


def test_what_cannot_be_filled_says_why_once_and_goes_on_with_flat_groups() -> None:
    player = PlayerByRule(lambda number: (None, None) if number == 2 else (0.0, float(number == 1)))
    supply = TogetherSupply(rounds(refill_rounds=2), player)
    with pytest.warns(UserWarning, match="3 of 4 groups without variance") as found:
        groups = supply.take(WEIGHTS)
    message = str(found[0].message)
    assert "of 10 groups that were drawn, 8 with a reward of 0 throughout, 1 with no attempt left." in message
    assert "raise objective.refill_rounds" in message
    assert [each.number for each in trained_on(groups, 4)] == [0, 1, 2, 3]
    supply.rounds.ledger.use([each.number for each in groups])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supply.take(WEIGHTS)


def test_groups_that_are_drawn_ahead_are_replaced_too_and_each_is_used_once() -> None:
    supply = AheadSupply(rounds(refill_rounds=8), ConcurrentPlayerByRule(every_third), Pacing(4, 1))
    used: list[int] = []
    for version in range(3):
        weights = Weights(version, np.zeros(1, np.uint32))
        supply.advance(weights)
        groups = supply.take(weights)
        assert not any(each.is_flat for each in trained_on(groups, 4))
        supply.rounds.ledger.use([each.number for each in groups])
        used += [each.number for each in groups]
    assert len(used) == len(set(used))
    assert sum(number % 3 == 2 for number in used) == 12
    supply.close()


class ComputingDigest:
    """Digest of weights that are not computed yet."""

    def __init__(self, is_computed: threading.Event) -> None:
        self._is_computed = is_computed

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self._is_computed.wait(timeout=30)
        return np.array([7], np.uint32)


class ThreadedPlayer(ConcurrentPlayerByRule):
    """Plays each group on a thread, which it takes as the event loop of the episodes."""

    def __init__(self, rewards: Callable[[int], tuple[float, float]]) -> None:
        super().__init__(rewards)
        self.threads: list[threading.Thread] = []

    def begin(self, attempts: Sequence[Any], done: Any, failed: Any) -> None:
        thread = threading.Thread(target=super().begin, args=(attempts, done, failed), daemon=True)
        thread.start()
        self.threads.append(thread)


def test_the_episodes_do_not_wait_for_the_digest_of_the_weights() -> None:
    is_computed = threading.Event()
    player = ThreadedPlayer(lambda number: (0.0, 1.0))
    supply = AheadSupply(rounds(), player, Pacing(4, 1))
    weights = Weights(0, ComputingDigest(is_computed), "settings:")
    taken: list[Group] = []
    trainer = threading.Thread(target=lambda: taken.extend(supply.take(weights)), daemon=True)
    trainer.start()
    try:
        while len(player.threads) < 4:
            trainer.join(0.01)
        for each in player.threads:
            each.join(10)
        are_free = not any(each.is_alive() for each in player.threads)
    finally:
        is_computed.set()
    trainer.join(30)
    assert are_free, "the episodes waited for the weights"
    assert [each.digest for each in taken] == ["settings:00000007"] * 4
    supply.close()


def test_a_group_that_cannot_be_written_stops_the_run() -> None:
    class FullJournal(RolloutJournal):
        def add(self, groups: Sequence[Group]) -> None:
            raise JournalError("the disk is full")

        def usable(self, version: int, digest: str) -> set[int]:
            return set()

    ahead = rounds()
    ahead.journal = FullJournal.__new__(FullJournal)
    supply = AheadSupply(ahead, ConcurrentPlayerByRule(lambda number: (0.0, 1.0)), Pacing(4, 1))
    with pytest.raises(JournalError, match="the disk is full"):
        supply.take(WEIGHTS)
    supply.close()


@pytest.mark.parametrize(
    ("rewards", "is_flat"), [((1.0, 1.0), True), ((1.0, 0.0), False), ((1.0, None), True), ((None, None), True)]
)
def test_a_group_is_flat_if_no_attempt_is_better_than_another(rewards: Any, is_flat: bool) -> None:
    found = [None if each is None else trajectory(0, each) for each in rewards]
    assert Group(0, 0, "", found).is_flat == is_flat
