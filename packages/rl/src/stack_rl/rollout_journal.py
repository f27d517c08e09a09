"""The journal of a process's rollouts, which keeps groups until a checkpoint includes their update.

Each batch is recorded with its groups and the digest of the weights that it was used with. A run that resumes from a
checkpoint gets the same batches again as long as its weights are bitwise equal; it then repeats the same updates and
samples nothing twice. From the first batch with different weights on, groups sampled by later weights are sampled
again.
"""

import json
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from stack_core.runtime.journal import Journal
from stack_rl.groups import Group, Ledger

__all__ = ["RecordedBatch", "RolloutJournal"]

_GROUP, _BATCH = "group", "batch"


@dataclass(frozen=True)
class _Batch:
    """A recorded batch: its groups, and the version, the digest and the scores of the weights before its updates."""

    groups: tuple[int, ...]
    digest: str
    version: int
    scores: Mapping[str, np.ndarray]

    def to_bytes(self) -> bytes:
        """Serializes the batch as a line of JSON followed by the scores as float32 arrays."""
        shapes = {name: array.shape for name, array in self.scores.items()}
        head = {"groups": self.groups, "digest": self.digest, "version": self.version, "scores": shapes}
        arrays = (np.asarray(array, "<f4").tobytes() for array in self.scores.values())
        return b"".join([json.dumps(head).encode(), b"\n", *arrays])

    @classmethod
    def from_bytes(cls, written: bytes) -> "_Batch":
        line, _, rest = written.partition(b"\n")
        head, scores, place = json.loads(line), dict[str, np.ndarray](), 0
        for name, shape in head["scores"].items():
            array = np.frombuffer(rest, "<f4", math.prod(shape), place)
            scores[name], place = array.reshape(shape), place + array.nbytes
        return cls(tuple(head["groups"]), head["digest"], head["version"], scores)


@dataclass(frozen=True)
class RecordedBatch:
    """A batch from the journal.

    Attributes:
      groups: its groups.
      version: version of the weights before its first update.
      scores: scores by these weights.
    """

    groups: list[Group]
    version: int
    scores: Mapping[str, np.ndarray]


@dataclass
class RolloutJournal:
    """Groups on disk that no checkpoint includes yet.

    One thread may add groups while another one uses them for batches.

    Attributes:
      journal: underlying journal file.
      recorded: groups that no batch has used yet, by number.
      is_begun: whether the journal has been read.
    """

    journal: Journal
    recorded: dict[int, Group] = field(default_factory=dict)
    is_begun: bool = False
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _unsaved: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # groups of each batch that no checkpoint includes
    _positions: dict[int, int] = field(default_factory=dict)  # number of batches used, by checkpoint step
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `recorded`

    @classmethod
    def open(cls, path: Path, *, new: bool) -> "RolloutJournal":
        """Opens or creates a journal file.

        Args:
          path: path of the file.
          new: True for a new run, which deletes an existing file.

        Raises:
          JournalError: the file cannot be read.
        """
        # SQLite's write-ahead log and its index belong to the database file, so all three are deleted together.
        for suffix in ("", "-wal", "-shm") if new else ():
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return cls(Journal(path))

    def begin(self, ledger: Ledger, step: int, settings: str = "") -> None:
        """Reads the journal, and acknowledges groups that `ledger` counts as used with the checkpoint of `step`.

        Args:
          ledger: ledger of the resumed checkpoint.
          step: step of that checkpoint.
          settings: digest of the sampling settings, a prefix of the digests of groups and batches. Groups with other
            settings, such as another environment, are dropped with a warning.
        """
        with self._lock:
            # If a later checkpoint is lost or damaged, its groups have to be used again.
            self.journal.retract(_GROUP, after=step)
            self.journal.retract(_BATCH, after=step)
            groups, batches = self.journal.read(_GROUP), self.journal.read(_BATCH)
            # A run killed between the checkpoint and its `saved` has not acknowledged these entries yet.
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
                _number(each.key): _Batch.from_bytes(each.payload)
                for each in batches
                if _number(each.key) >= ledger.batches
            }
            self._unsaved.clear()
            self._positions.clear()
            self.is_begun = True
            self._drop_foreign(settings)

    def restart(self) -> None:
        """Drops all entries, for a run whose data starts over, such as with other settings named by `--allow`."""
        if groups := self.journal.read(_GROUP, waiting=True):
            warnings.warn(
                f"The run's data starts over: {len(groups)} groups in its journal are not trained on.", stacklevel=4
            )
        self.journal.drop(each.number for each in self.journal.read())
        self.is_begun = True

    def _drop_foreign(self, settings: str) -> None:
        """Drops groups and batches that were sampled with other settings."""
        groups = [each for each in self.recorded.values() if not each.digest.startswith(settings)]
        batches = {number: each for number, each in self._batches.items() if not each.digest.startswith(settings)}
        if groups:
            warnings.warn(
                f"{len(groups)} groups in the run's journal were drawn with another data.environment or other files of "
                "its tasks, another data.groups, group_size, seq_tokens, temperature or other sampling setting, or "
                "another number of processes. They are drawn again.",
                stacklevel=5,
            )
        self._drop(_BATCH, batches)
        self._batches = {number: each for number, each in self._batches.items() if number not in batches}
        self._forget(groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Writes groups in one transaction; existing groups are not overwritten."""
        with self._lock:
            self.journal.append_all(_GROUP, [(str(each.number), each.to_bytes()) for each in groups])
            self.recorded |= {each.number: each for each in groups}

    def has(self, batch: int, digest: str | None) -> bool:
        """Returns whether a batch is recorded, with all of its groups and with these weights.

        Args:
          batch: number of the batch.
          digest: digest of the weights; None if they have been trained on a part of the batch, so that they may differ.
        """
        with self._lock:
            found = self._batches.get(batch)
            return (
                found is not None
                and digest in (None, found.digest)
                and all(each in self.recorded for each in found.groups)
            )

    def replay(self, batch: int) -> RecordedBatch:
        """Returns a batch that the journal `has`."""
        with self._lock:
            found = self._batches.pop(batch)
            self._unsaved[batch] = found.groups
            groups = [self.recorded.pop(each) for each in found.groups]
            return RecordedBatch(groups, found.version, found.scores)

    def give_up(self, batch: int, digest: str | None, version: int) -> None:
        """Drops a recorded batch that cannot be replayed, and all later ones.

        If it was recorded with other weights, the groups that these weights sampled are dropped with a warning.
        Otherwise another process has no record of it, and the groups are used again.

        Args:
          batch: number of the batch.
          digest: digest of the weights, as for `has`.
          version: version of the weights.
        """
        has_weights = self.has(batch, digest)
        with self._lock:
            if batch not in self._batches:
                return
            if not has_weights:
                self._forget_sampled_since(batch, version)
            self._drop(_BATCH, self._batches)
            self._batches = {}

    def usable(self, version: int, digest: str) -> set[int]:
        """Returns the recorded groups that this run's weights may have sampled, and drops the rest."""
        with self._lock:
            foreign = [
                each
                for each in self.recorded.values()
                if each.newest > version or (each.version == version and each.digest != digest)
            ]
            self._forget(foreign)
            return set(self.recorded)

    def note(
        self,
        batch: int,
        groups: Sequence[int],
        digest: str,
        version: int,
        scores: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Records the groups of a batch, which other batches then cannot use, and the scores before its updates."""
        with self._lock:
            payload = _Batch(tuple(groups), digest, version, scores).to_bytes()
            self.journal.append(_BATCH, payload, key=str(batch))
            self._unsaved[batch] = tuple(groups)
            for each in groups:
                del self.recorded[each]

    def position(self, step: int, batches: int) -> None:
        """Stores the number of batches whose updates the checkpoint of `step`, which is being saved, all includes."""
        self._positions[step] = batches

    def saved(self, step: int, checkpoints: Sequence[int]) -> None:
        """Acknowledges the groups used by the checkpoint of `step`, and deletes those that no kept checkpoint needs."""
        # Checkpoints are written in the background: batches used since `position` belong to the next checkpoint.
        batches = [each for each in self._unsaved if each < self._positions.get(step, 0)]
        groups = [number for each in batches for number in self._unsaved.pop(each)]
        self.journal.acknowledge(_GROUP, map(str, groups), step)
        self.journal.acknowledge(_BATCH, map(str, batches), step)
        self._positions = {each: taken for each, taken in self._positions.items() if each > step}
        # A run may resume from its oldest checkpoint, and then uses all groups acknowledged since.
        if checkpoints:
            self.journal.forget(_GROUP, through=checkpoints[0])
            self.journal.forget(_BATCH, through=checkpoints[0])

    def close(self) -> None:
        self.journal.close()

    def _forget_sampled_since(self, batch: int, version: int) -> None:
        """Drops the groups sampled by weights from `version` on, with a warning."""
        foreign = [each for each in self.recorded.values() if each.newest >= version]
        warnings.warn(
            f"The weights before batch {batch} differ from the recorded ones: {len(self._batches)} batches are made "
            f"again, and {len(foreign)} groups are sampled again.",
            stacklevel=6,
        )
        self._forget(foreign)

    def _forget(self, groups: Sequence[Group]) -> None:
        numbers = {each.number: each for each in groups}
        self._drop(_GROUP, numbers)
        self.recorded = {number: each for number, each in self.recorded.items() if number not in numbers}

    def _drop(self, kind: str, keys: Mapping[int, object]) -> None:
        if keys:
            self.journal.drop(each.number for each in self.journal.read(kind) if _number(each.key) in keys)


def _number(key: str | None) -> int:
    assert key is not None, "every entry has a key"
    return int(key)
