"""The directory that holds a run's checkpoints: their names, and what may be removed from it.

| name | what it is |
|---|---|
| 00000300 | a whole checkpoint: the name is given by one rename, after its files are on the disk |
| 00000300.orbax-checkpoint-tmp | one being written, or one whose writing was cut off |
| 00000300.set-aside | damaged, or of a course of training that was given up; left to the user |
| 00000300.deleted | on its way out; renamed first, so that no half-deleted directory looks whole |
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
        """Steps of the whole checkpoints, oldest first."""
        return tuple(sorted(int(path.name) for path in self._entries() if path.name.isdecimal()))

    def partial(self) -> tuple[tuple[int, Path], ...]:
        """Steps and paths of the checkpoints whose writing did not end."""
        steps = ((path.name.removesuffix(_PARTIAL), path) for path in self._entries() if path.name.endswith(_PARTIAL))
        return tuple(sorted((int(step), path) for step, path in steps if step.isdecimal()))

    def prepare(self, step: int) -> None:
        """Makes room for a checkpoint of `step`: removes partial ones and sets aside those of this step and beyond."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.remove_partial()
        for beyond in self.steps():
            if beyond >= step:
                self._set_aside(self.path(beyond), step)

    def remove_partial(self) -> None:
        for path in self._entries():
            if path.name.endswith((_PARTIAL, _DELETED)):
                shutil.rmtree(path)

    def delete(self, steps: Sequence[int]) -> None:
        """Deletes whole checkpoints, after what was renamed in the directory before is on the disk."""
        _sync(self.root)
        for step in steps:
            doomed = self.path(step).with_suffix(_DELETED)
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)

    def _entries(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []

    def _set_aside(self, path: Path, step: int) -> None:
        number = 1
        while (aside := path.with_suffix(f"{_SET_ASIDE}-{number}")).exists():
            number += 1
        path.rename(aside)
        warnings.warn(
            f"Checkpoint {path} is set aside as {aside.name}: training reached step {step} without it. "
            "Delete it if you need it no more.",
            stacklevel=4,
        )


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
