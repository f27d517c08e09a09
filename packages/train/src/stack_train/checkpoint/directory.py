"""The directory of a run's checkpoints: naming, and deletion of partial and old checkpoints.

| name | content |
|---|---|
| 00000300 | a complete checkpoint, renamed to this after its files are durable |
| 00000300.orbax-checkpoint-tmp | a checkpoint that is being written, or whose writing was interrupted |
| 00000300.set-aside-1 | a damaged checkpoint, or a checkpoint of an abandoned course of training; left to the user |
| 00000300.deleted | a checkpoint being deleted, renamed first because a half-deleted directory must not look complete |
"""

import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointDirectory"]

_PARTIAL = ".orbax-checkpoint-tmp"
_SET_ASIDE = ".set-aside"
_DELETED = ".deleted"


@dataclass(frozen=True)
class CheckpointDirectory:
    """The directory at `root`, which need not exist yet."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, oldest first."""
        return tuple(sorted(int(path.name) for path in self._entries() if path.name.isdecimal()))

    def partial(self) -> tuple[tuple[int, Path], ...]:
        """Returns the steps and paths of the checkpoints whose writing did not finish."""
        steps = ((path.name.removesuffix(_PARTIAL), path) for path in self._entries() if path.name.endswith(_PARTIAL))
        return tuple(sorted((int(step), path) for step, path in steps if step.isdecimal()))

    def quarantined(self) -> tuple[tuple[int, Path], ...]:
        """Returns the steps and paths of the checkpoints that were set aside."""
        named = ((path.name.partition(_SET_ASIDE), path) for path in self._entries())
        return tuple(sorted((int(step), path) for (step, mark, _), path in named if mark and step.isdecimal()))

    def prepare(self, step: int) -> None:
        """Prepares saving `step`: deletes partial checkpoints, and sets aside checkpoints of this and later steps."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        for beyond in self.steps():
            if beyond >= step:
                self._quarantine(self.path(beyond), step)

    def remove_partial(self) -> None:
        for path in self._entries():
            # Also deletions that a kill interrupted.
            if path.name.endswith((_PARTIAL, _DELETED)):
                shutil.rmtree(path)

    def delete(self, steps: Sequence[int]) -> None:
        """Deletes complete checkpoints, after earlier renames in the directory are durable."""
        # A crash must not lose the new checkpoint's rename after the old files are gone.
        _sync(self.root)
        for step in steps:
            doomed = self.path(step).with_suffix(_DELETED)
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)

    def _entries(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []

    def _quarantine(self, path: Path, step: int) -> None:
        number = 1
        while (aside := path.with_suffix(f"{_SET_ASIDE}-{number}")).exists():
            number += 1
        path.rename(aside)
        warnings.warn(
            f"Checkpoint {path} is set aside as {aside.name}: training reached step {step} without it. "
            "Delete it if it is no longer needed.",
            stacklevel=4,
        )


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
