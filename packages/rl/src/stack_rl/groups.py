"""Groups of episodes, their serialization, and the ledger of used groups."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from stack_core.abi.errors import DataError
from stack_core.abi.generation import PromptImage
from stack_rl.choosing import Memory
from stack_rl.contracts import Trajectory

__all__ = ["Group", "Ledger", "groups_from_bytes", "groups_to_bytes", "trained_on"]

# Serialized in little-endian order on every machine.
_ARRAYS: Final = {"tokens": "<i4", "sampled": "?", "logprobs": "<f4", "versions": "<i4", "rewards": "<f4"}
_PLAIN: Final = (
    "group",
    "task",
    "verdict",
    "is_truncated",
    "is_cut",
    "limit_tokens",
    "action_starts",
    "action_temperatures",
    "branch_starts",
    "parsed",
)


@dataclass(frozen=True)
class Group:
    """All attempts at one task.

    Attributes:
      number: index of the group in the run, from 0. It determines the task and the sampling seeds.
      version: version of the weights at dispatch; later tokens may come from newer weights.
      digest: digest of the weights at dispatch.
      trajectories: one trajectory per attempt; None for a failed attempt that is dropped.
      batch: number of batches that were used before the dispatch.
    """

    number: int
    version: int
    digest: str
    trajectories: Sequence[Trajectory | None]
    batch: int = 0

    @property
    def rewards(self) -> list[float]:
        """Total rewards of the attempts that were not dropped."""
        return [float(each.rewards.sum()) for each in self.trajectories if each is not None]

    @property
    def is_flat(self) -> bool:
        """True if all rewards are equal, as with a single attempt; such a group contributes no gradient."""
        return len(set(self.rewards)) < 2

    @property
    def newest(self) -> int:
        """Version of the newest weights that sampled a token of the group."""
        versions = [int(each.versions.max(initial=-1)) for each in self.trajectories if each is not None]
        return max([*versions, self.version])

    def to_bytes(self) -> bytes:
        """Serializes the group as a line of JSON followed by the arrays of each trajectory."""
        there = [each for each in self.trajectories if each is not None]
        # The attempts at a task have the same images.
        images = {image.digest: image for each in there for image in each.images}
        head = {
            "version": self.version,
            "batch": self.batch,
            "digest": self.digest,
            "dropped": [each is None for each in self.trajectories],
            "images": [_plain_image(each) for each in images.values()],
            "trajectories": [_plain(each, list(images)) for each in there],
        }
        pixels = (np.ascontiguousarray(each.pixels).tobytes() for each in images.values())
        parts = (part for each in there for part in _buffers(each))
        return b"".join([json.dumps(head).encode(), b"\n", *pixels, *parts])

    @classmethod
    def from_bytes(cls, number: int, written: bytes) -> "Group":
        """Deserializes a group written by `to_bytes`."""
        line, _, rest = written.partition(b"\n")
        head = json.loads(line)
        buffers = _Buffers(rest)
        images = [buffers.image(each) for each in head.get("images", ())]  # missing in journals of earlier versions
        there = iter([buffers.trajectory(each, images) for each in head["trajectories"]])
        trajectories = [None if dropped else next(there) for dropped in head["dropped"]]
        return cls(number, head["version"], head["digest"], trajectories, head["batch"])


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Serializes groups as a line of JSON with their numbers and sizes, followed by each group."""
    written = [each.to_bytes() for each in groups]
    head = [[each.number, len(part)] for each, part in zip(groups, written, strict=True)]
    return b"\n".join([json.dumps(head).encode(), *written])


def groups_from_bytes(written: bytes) -> list[Group]:
    """Deserializes groups written by `groups_to_bytes`."""
    line, _, _ = written.partition(b"\n")
    found, place = list[Group](), len(line) + 1
    for number, size in json.loads(line):
        found.append(Group.from_bytes(number, written[place : place + size]))
        place += size + 1
    return found


def trained_on(groups: Sequence[Group], count: int) -> list[Group]:
    """Selects `count` of a batch's groups to train on, preferring unequal rewards; sorted by number."""
    chosen = sorted(groups, key=lambda each: (each.is_flat, each.number))[:count]
    return sorted(chosen, key=lambda each: each.number)


def _buffers(trajectory: Trajectory) -> Iterator[bytes]:
    for name, dtype in _ARRAYS.items():
        yield np.asarray(getattr(trajectory, name), dtype).tobytes()
    for part in trajectory.candidates or ():
        yield np.asarray(part, "<i4").tobytes()
    if trajectory.experts is not None:
        yield np.asarray(trajectory.experts, "<i2").tobytes()


def _plain_image(image: PromptImage) -> dict[str, Any]:
    plain = {"tokens": image.tokens, "layout": image.layout, "grid": image.grid, "digest": image.digest.hex()}
    return {**plain, "shape": image.pixels.shape}


def _plain(trajectory: Trajectory, images: Sequence[bytes]) -> dict[str, Any]:
    return {
        "images": [[images.index(image.digest), image.start] for image in trajectory.images],
        "count": len(trajectory.tokens),
        "candidates": None if trajectory.candidates is None else len(trajectory.candidates[1]),
        "experts": None if trajectory.experts is None else trajectory.experts.shape,
        "facts": dict(trajectory.facts),
        **{name: getattr(trajectory, name) for name in _PLAIN},
    }


@dataclass
class _Buffers:
    """A byte string from which arrays are read in sequence."""

    rest: bytes
    _place: int = 0

    def image(self, head: Mapping[str, Any]) -> PromptImage:
        """Reads an image, whose place in a trajectory is not known yet."""
        pixels = self._take(math.prod(head["shape"]), "u1").reshape(head["shape"])
        grid = None if head["grid"] is None else tuple(head["grid"])
        return PromptImage(0, head["tokens"], pixels, bytes.fromhex(head["digest"]), head["layout"], grid)

    def trajectory(self, head: Mapping[str, Any], images: Sequence[PromptImage]) -> Trajectory:
        arrays: dict[str, Any] = {name: self._take(head["count"], dtype) for name, dtype in _ARRAYS.items()}
        if head["candidates"] is not None:
            arrays["candidates"] = self._take(head["count"], "<i4"), self._take(head["candidates"], "<i4")
        if (shape := head.get("experts")) is not None:  # journals of earlier versions lack the key
            arrays["experts"] = self._take(math.prod(shape), "<i2").reshape(shape)
        arrays["images"] = tuple(replace(images[number], start=start) for number, start in head.get("images", ()))
        return Trajectory(facts=head["facts"], **{name: head[name] for name in _PLAIN if name in head}, **arrays)

    def _take(self, count: int, dtype: str) -> np.ndarray:
        array = np.frombuffer(self.rest, dtype, count, self._place)
        self._place += array.nbytes
        return array


@dataclass
class Ledger:
    """The groups used by all batches so far: every group below `frontier`, and the groups in `beyond`.

    `memory` is the memory of the tasks' choice after these batches; see `ChoosesTasks`.

    Invariant: `frontier` is the first unused group, so a group below it can be neither skipped nor used again.
    """

    batches: int = 0
    frontier: int = 0
    beyond: set[int] = field(default_factory=set)
    memory: Memory = field(default_factory=dict)

    def use(self, numbers: Iterable[int]) -> None:
        """Marks the groups of the next batch as used."""
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
        """Yields the unused groups in increasing order, without end."""
        return (number for number in itertools.count(self.frontier) if number not in self.beyond)

    def state(self) -> dict[str, Any]:
        memory = {"memory": dict(self.memory)} if self.memory else {}
        return {"batches": self.batches, "frontier": self.frontier, "beyond": sorted(self.beyond), **memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the ledger from `state()`."""
        self.batches, self.frontier, self.beyond = state["batches"], state["frontier"], set(state["beyond"])
        self.memory = state.get("memory", {})
