"""Replay of stored groups in place of groups with equal rewards."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stack_core.abi.errors import DataError
from stack_rl.groups import Group, groups_from_bytes, groups_to_bytes

__all__ = ["ReplayBuffer", "ReplayFiles"]


@dataclass(frozen=True)
class ReplayBuffer:
    """The newest groups of earlier batches with unequal rewards; each may be trained on once more.

    Source: the replay buffer of TRL's `GRPOWithReplayBufferTrainer`. Departures: groups are replayed newest first,
    because their sampling policy is closest to the current one, instead of by reward, and at most once.

    Attributes:
      size: maximum number of stored groups; 0 stores none.
      groups: stored groups, oldest first.
    """

    size: int = 0
    groups: tuple[Group, ...] = ()

    def replace_flat(self, chosen: Sequence[Group]) -> "tuple[list[Group], ReplayBuffer]":
        """Replaces flat groups of a batch by stored ones.

        Args:
          chosen: groups of the batch.

        Returns:
          As many groups as `chosen`, sorted by number, and the buffer after this batch.
        """
        varied = [each for each in chosen if not each.is_flat]
        kept = max(len(self.groups) - (len(chosen) - len(varied)), 0)
        replayed = self.groups[kept:]
        flat = [each for each in chosen if each.is_flat][: len(chosen) - len(varied) - len(replayed)]
        stored = (*self.groups[:kept], *varied)
        found = sorted([*varied, *replayed, *flat], key=lambda each: each.number)
        return found, replace(self, groups=stored[max(len(stored) - self.size, 0) :])


@dataclass(frozen=True)
class ReplayFiles:
    """A file with the buffer of each checkpoint in a run's directory, of one process.

    Attributes:
      directory: directory of the run.
      process: index of the process.
    """

    directory: Path
    process: int = 0

    def save(self, step: int, buffer: ReplayBuffer) -> None:
        """Writes the buffer of the checkpoint of `step`."""
        path = self._path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(groups_to_bytes(buffer.groups))
        unfinished.replace(path)

    def load(self, step: int, size: int, settings: str) -> ReplayBuffer:
        """Reads the buffer of the checkpoint of `step`, without groups that were sampled with other settings.

        Args:
          step: step of the checkpoint.
          size: maximum number of stored groups.
          settings: digest of the sampling settings, see `RolloutJournal.begin`.

        Raises:
          DataError: the file is missing.
        """
        path = self._path(step)
        if not path.exists():
            raise DataError(
                f"{path} with the groups to replay is missing, so the run cannot resume from step {step}. Restore the "
                "file, or set data.replay_groups: 0 with --allow data.replay_groups."
            )
        groups = [each for each in groups_from_bytes(path.read_bytes()) if each.digest.startswith(settings)]
        return ReplayBuffer(size, tuple(groups[-size:]))

    def keep(self, newest: int, steps: Sequence[int]) -> None:
        """Deletes the files of former checkpoints that are not among `steps`; `newest` is the last saved one."""
        for path in self._path(0).parent.glob("*.groups"):
            if int(path.stem) < newest and int(path.stem) not in steps:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Deletes the files of all processes, which a run that failed to start may have left."""
        shutil.rmtree(self.directory / "replay", ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.directory / "replay" / str(self.process) / f"{step:08d}.groups"
