"""Groups of episodes, which batches are made of: what one holds, how it is written down, and which were used."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stack_core.abi.errors import DataError
from stack_rl.contracts import Trajectory

__all__ = ["Group", "Ledger", "trained_on"]

_ARRAYS: Final = {"tokens": "<i4", "sampled": "?", "logprobs": "<f4", "versions": "<i4", "rewards": "<f4"}
_PLAIN: Final = ("group", "task", "verdict", "is_truncated")


@dataclass(frozen=True)
class Group:
    """The attempts at one task.

    Attributes:
      number: of the group in the run, from 0; it decides the task and the seeds of the draws.
      version: of the weights when it was dispatched; later tokens may be of later ones.
      digest: of those weights.
      trajectories: None where an attempt failed and is dropped.
    """

    number: int
    version: int
    digest: str
    trajectories: Sequence[Trajectory | None]

    @property
    def rewards(self) -> list[float]:
        """Of each attempt that was not dropped."""
        return [float(each.rewards.sum()) for each in self.trajectories if each is not None]

    @property
    def is_flat(self) -> bool:
        """Whether all rewards are equal, so that no attempt is better than another; so are those of one attempt."""
        return len(set(self.rewards)) < 2

    @property
    def newest(self) -> int:
        """The newest version that drew a token."""
        versions = [int(each.versions.max(initial=-1)) for each in self.trajectories if each is not None]
        return max([*versions, self.version])

    def to_bytes(self) -> bytes:
        """A line of JSON, and behind it the arrays of each trajectory."""
        there = [each for each in self.trajectories if each is not None]
        head = {
            "version": self.version,
            "digest": self.digest,
            "dropped": [each is None for each in self.trajectories],
            "trajectories": [_plain(each) for each in there],
        }
        return b"".join([json.dumps(head).encode(), b"\n", *(part for each in there for part in _buffers(each))])

    @classmethod
    def from_bytes(cls, number: int, written: bytes) -> "Group":
        """The group of a number that `to_bytes` wrote."""
        line, _, rest = written.partition(b"\n")
        head = json.loads(line)
        buffers = _Buffers(rest)
        there = iter([buffers.trajectory(each) for each in head["trajectories"]])
        trajectories = [None if dropped else next(there) for dropped in head["dropped"]]
        return cls(number, head["version"], head["digest"], trajectories)


def trained_on(groups: Sequence[Group], count: int) -> list[Group]:
    """The `count` of a batch's groups that its rows hold, by number: those with unequal rewards before flat ones."""
    chosen = sorted(groups, key=lambda each: (each.is_flat, each.number))[:count]
    return sorted(chosen, key=lambda each: each.number)


def _buffers(trajectory: Trajectory) -> Iterator[bytes]:
    for name, dtype in _ARRAYS.items():
        yield np.asarray(getattr(trajectory, name), dtype).tobytes()
    for part in trajectory.candidates or ():
        yield np.asarray(part, "<i4").tobytes()


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "count": len(trajectory.tokens),
        "candidates": None if trajectory.candidates is None else len(trajectory.candidates[1]),
        "facts": dict(trajectory.facts),
        **{name: getattr(trajectory, name) for name in _PLAIN},
    }


@dataclass
class _Buffers:
    """Bytes that arrays are taken from, one after the other."""

    rest: bytes
    _place: int = 0

    def trajectory(self, head: Mapping[str, Any]) -> Trajectory:
        arrays: dict[str, Any] = {name: self._take(head["count"], dtype) for name, dtype in _ARRAYS.items()}
        if head["candidates"] is not None:
            arrays["candidates"] = self._take(head["count"], "<i4"), self._take(head["candidates"], "<i4")
        return Trajectory(facts=head["facts"], **{name: head[name] for name in _PLAIN}, **arrays)

    def _take(self, count: int, dtype: str) -> np.ndarray:
        array = np.frombuffer(self.rest, dtype, count, self._place)
        self._place += array.nbytes
        return array


@dataclass
class Ledger:
    """Which groups the batches so far were made of: all below `frontier`, and `beyond` it.

    Invariant: `frontier` is the first group that no batch has used, so nothing below it can be skipped or used again.
    """

    batches: int = 0
    frontier: int = 0
    beyond: set[int] = field(default_factory=set)

    def use(self, numbers: Iterable[int]) -> None:
        """Notes the groups of the next batch."""
        for number in numbers:
            if self.is_used(number):
                raise DataError(f"Group {number} would be trained on twice; batch {self.batches} holds it again.")
            self.beyond.add(number)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1
        self.batches += 1

    def is_used(self, number: int) -> bool:
        return number < self.frontier or number in self.beyond

    def unused(self) -> Iterator[int]:
        """Groups that no batch has used, in rising order, without end."""
        return (number for number in itertools.count(self.frontier) if number not in self.beyond)

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches, "frontier": self.frontier, "beyond": sorted(self.beyond)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Becomes the ledger of `state()`."""
        self.batches, self.frontier, self.beyond = state["batches"], state["frontier"], set(state["beyond"])
