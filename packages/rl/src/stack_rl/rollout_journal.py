"""The journal of a run's rollouts: what was drawn stays until a checkpoint holds what was learned from it.

A batch is noted with the groups that it is made of and the digest of the weights that it was handed out for. A run that
goes on from a checkpoint is handed the same batches again as long as its weights are the same, bit for bit: then it
takes the same course, and nothing is drawn twice. Where they differ, what later weights had drawn is drawn again.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stack_core.runtime.journal import Journal
from stack_rl.groups import Group, Ledger

__all__ = ["RolloutJournal"]

_GROUP, _BATCH = "group", "batch"


@dataclass(frozen=True)
class _Batch:
    groups: tuple[int, ...]
    digest: str


@dataclass
class RolloutJournal:
    """What was drawn and not learned from, on disk.

    Attributes:
      recorded: groups that wait to be used, by their numbers.
      is_begun: they were read.
    """

    journal: Journal
    recorded: dict[int, Group] = field(default_factory=dict)
    is_begun: bool = False
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _unsaved: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the groups of batches that no checkpoint has
    _positions: dict[int, int] = field(default_factory=dict)  # how many batches were taken, by a checkpoint's step

    @classmethod
    def open(cls, path: Path, *, new: bool) -> "RolloutJournal":
        """Opens the journal of a file, or makes it.

        Args:
          new: the run begins; what another left in the file is removed.

        Raises:
          JournalError: it cannot be read.
        """
        for suffix in ("", "-wal", "-shm") if new else ():
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return cls(Journal(path))

    def begin(self, ledger: Ledger, step: int, settings: str = "") -> None:
        """Reads the journal. Groups that `ledger` counts as used are acknowledged with the checkpoint of `step`.

        Args:
          settings: digest of the settings that groups are drawn with, which the digests of groups and batches begin
            with. Groups of other settings, such as another environment, are dropped with a warning.
        """
        self.journal.retract(_GROUP, after=step)
        self.journal.retract(_BATCH, after=step)
        groups, batches = self.journal.read(_GROUP), self.journal.read(_BATCH)
        used = [each.key for each in groups if ledger.is_used(_number(each.key))]
        self.journal.acknowledge(_GROUP, filter(None, used), step)
        done = [each.key for each in batches if _number(each.key) < ledger.batches]
        self.journal.acknowledge(_BATCH, filter(None, done), step)
        self.recorded = {
            _number(each.key): Group.from_bytes(_number(each.key), each.payload)
            for each in groups
            if not ledger.is_used(_number(each.key))
        }
        self._batches = {
            _number(each.key): _Batch(tuple(found["groups"]), found["digest"])
            for each in batches
            if _number(each.key) >= ledger.batches and (found := json.loads(each.payload))
        }
        self._unsaved.clear()
        self._positions.clear()
        self.is_begun = True
        self._drop_foreign(settings)

    def restart(self) -> None:
        """Drops everything, for a run whose data begins anew, such as with other settings that `--allow` named."""
        if groups := self.journal.read(_GROUP, waiting=True):
            warnings.warn(
                f"The run's data begins anew: {len(groups)} groups in its journal are not trained on.", stacklevel=4
            )
        self.journal.drop(each.number for each in self.journal.read())
        self.is_begun = True

    def _drop_foreign(self, settings: str) -> None:
        """Drops groups and batches that were drawn with other settings."""
        groups = [each for each in self.recorded.values() if not each.digest.startswith(settings)]
        batches = {number: each for number, each in self._batches.items() if not each.digest.startswith(settings)}
        if groups:
            warnings.warn(
                f"{len(groups)} groups in the run's journal were drawn with another data.environment or other files of "
                "its tasks, or another data.groups, group_size, seq_tokens, top_p or top_k. They are drawn again.",
                stacklevel=5,
            )
        self._drop(_BATCH, batches)
        self._batches = {number: each for number, each in self._batches.items() if number not in batches}
        self._forget(groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Writes groups down, all or none; one that is there already stays as it is."""
        self.journal.append_all(_GROUP, [(str(each.number), each.to_bytes()) for each in groups])
        self.recorded |= {each.number: each for each in groups}

    def replayed(self, batch: int, digest: str) -> list[Group] | None:
        """The groups that a batch was made of when weights with this digest were there; None if it is to be made.

        What a batch of other weights and later ones were made of is forgotten, with a warning.
        """
        found = self._batches.pop(batch, None)
        if found is not None and found.digest == digest and all(each in self.recorded for each in found.groups):
            self._unsaved[batch] = found.groups
            return [self.recorded.pop(each) for each in found.groups]
        if found is not None:
            self._batches[batch] = found
            self._give_up(batch)
        return None

    def usable(self, version: int, digest: str) -> set[int]:
        """The groups on record that weights of the run's own course have drawn; others are forgotten."""
        foreign = [
            each
            for each in self.recorded.values()
            if each.newest > version or (each.version == version and each.digest != digest)
        ]
        self._forget(foreign)
        return set(self.recorded)

    def note(self, batch: int, groups: Sequence[int], digest: str) -> None:
        """Writes down what a batch is made of; its groups wait no more."""
        payload = json.dumps({"groups": list(groups), "digest": digest}).encode()
        self.journal.append(_BATCH, payload, key=str(batch))
        self._unsaved[batch] = tuple(groups)
        for each in groups:
            del self.recorded[each]

    def position(self, step: int, batches: int) -> None:
        """Remembers that a checkpoint of `step`, which is being saved, has learned from so many batches."""
        self._positions[step] = batches

    def saved(self, step: int, kept: Sequence[int]) -> None:
        """Acknowledges what the checkpoint of `step` has learned from, and forgets what no kept one needs."""
        batches = [each for each in self._unsaved if each < self._positions.get(step, 0)]
        groups = [number for each in batches for number in self._unsaved.pop(each)]
        self.journal.acknowledge(_GROUP, map(str, groups), step)
        self.journal.acknowledge(_BATCH, map(str, batches), step)
        self._positions = {each: taken for each, taken in self._positions.items() if each > step}
        if kept:
            self.journal.forget(_GROUP, through=kept[0])
            self.journal.forget(_BATCH, through=kept[0])

    def close(self) -> None:
        self.journal.close()

    def _give_up(self, batch: int) -> None:
        """Forgets batches from one on, whose weights are not those of this run, and what such weights drew."""
        foreign = [each for each in self.recorded.values() if each.newest >= batch]
        warnings.warn(
            f"The weights before batch {batch} are not those that it was drawn for when the run was here before: "
            f"{len(self._batches)} batches are made again, of which {len(foreign)} groups are drawn again.",
            stacklevel=6,
        )
        self._drop(_BATCH, self._batches)
        self._batches = {}
        self._forget(foreign)

    def _forget(self, groups: Sequence[Group]) -> None:
        numbers = {each.number: each for each in groups}
        self._drop(_GROUP, numbers)
        self.recorded = {number: each for number, each in self.recorded.items() if number not in numbers}

    def _drop(self, kind: str, keys: Mapping[int, object]) -> None:
        if keys:
            self.journal.drop(each.number for each in self.journal.read(kind) if _number(each.key) in keys)


def _number(key: str | None) -> int:
    assert key is not None, "every entry of rollouts has a key"
    return int(key)
