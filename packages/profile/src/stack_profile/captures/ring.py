"""A directory of captures with a limit on its size: the oldest captures of normal steps are deleted first.

    out/
    ├── ring.lock            locked by flock(2) while a process writes the ring
    └── plugins/profile/     the layout of TensorBoard
        ├── ring_*           captures of normal steps, deleted in order of time
        ├── slow_step_N      capture of a slow step and its neighbours, never deleted for others
        └── slow_step_N_before    last capture of normal steps before it

Files are renamed into place, the trace last. A process that is killed while it writes leaves at most one folder without
a trace, which readers ignore and the next process removes.
"""

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from stack_core.abi.config import config
from stack_profile.captures.processes import SUFFIX
from stack_profile.captures.stacks import HIGHEST_HZ, STACKS_HZ
from stack_profile.errors import CaptureError

__all__ = ["ContinuousConfig", "Ring", "Stored", "replace_file", "stored_captures", "total_bytes"]

_NORMAL, _SLOW, _BEFORE = "ring_", "slow_step_", "_before"
_MEGABYTE: Final = 1e6


@config
class ContinuousConfig:
    """Settings of the continuous mode, which records a process all the time and keeps a ring of captures on disk.

    Attributes:
      ring_mb: maximum size of all captures of the mode in their directory, in units of 10^6 bytes.
      share: maximum share of one processor's time. The mode measures the time that it takes, and pauses until the share
        holds; slow steps during a pause are not recorded.
      every_s: minimum time between two captures of normal steps, in seconds.
      stacks_hz: samples of the threads' Python stacks per second in captures of normal steps; 0 for none.
    """

    ring_mb: Annotated[float, Field(gt=0)] = 256.0
    share: Annotated[float, Field(gt=0, le=0.1)] = 0.005
    every_s: Annotated[float, Field(ge=0)] = 60.0
    stacks_hz: Annotated[float, Field(ge=0, le=HIGHEST_HZ)] = STACKS_HZ


@dataclass(frozen=True)
class Stored:
    """A capture in a ring.

    Attributes:
      path: its folder.
      kind: "normal", "slow", or "before" for the normal steps that are kept with a slow one.
      files: size of each file by its inode; captures share the files of programs.
    """

    path: Path
    kind: str
    files: dict[int, int]


def stored_captures(out: Path) -> list[Stored]:
    """Returns the captures of the continuous mode in a directory, the oldest first; incomplete captures are skipped."""
    found = []
    for path in sorted((out / "plugins" / "profile").glob("*"), key=_modified):
        kind = _kind(path.name)
        if kind and any(path.glob(f"*{SUFFIX}")):
            found.append(Stored(path, kind, _files(path)))
    return found


def total_bytes(stored: Sequence[Stored]) -> int:
    """Returns the size of captures, in which shared files count once."""
    return sum({inode: size for each in stored for inode, size in each.files.items()}.values())


class Ring:
    """A ring that this process writes, until it is closed.

    Attributes:
      out: directory of the captures.
      total_bytes: size of all captures of the ring.
    """

    def __init__(self, out: Path, limit_mb: float, slow_steps: int) -> None:
        """Opens a ring.

        Args:
          out: directory of the captures, created if missing.
          limit_mb: maximum size in units of 10^6 bytes.
          slow_steps: maximum number of captures of slow steps.

        Raises:
          CaptureError: the directory cannot be written, or another process writes the ring.
        """
        self.out, self._limit_mb, self._slow_steps = out, limit_mb, slow_steps
        try:
            (out / "plugins" / "profile").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(out / "ring.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CaptureError(f"The ring of captures cannot be written: {error}. Name another directory.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            writer = os.pread(self._lock, 32, 0).decode() or "unknown"
            os.close(self._lock)
            raise CaptureError(
                f"Process {writer} writes the ring of captures in {str(out)!r}, and a ring has one writer. "
                "Name another directory."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        for path in (out / "plugins" / "profile").glob(f"{_NORMAL}*"):
            if not any(path.glob(f"*{SUFFIX}")):  # left by a process that was killed
                shutil.rmtree(path, ignore_errors=True)
        self._stored = stored_captures(out)
        self._programs: dict[str, tuple[int, Path]] = {}
        self._changing = threading.Lock()  # each capture is written by its own thread

    @property
    def total_bytes(self) -> int:
        return total_bytes(self._stored)

    @staticmethod
    def new_name() -> str:
        """Returns a name for a capture of normal steps; names sort by time."""
        return f"{_NORMAL}{datetime.now(UTC).strftime('%Y_%m_%d_%H_%M_%S_%f')}"

    def write(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        """Writes the files of a capture, the trace last, and deletes old captures before the limit is exceeded.

        Raises:
          CaptureError: the capture is larger than the ring, or cannot be written although no other normal one is left.
        """
        with self._changing:
            self._write(folder, files)

    def _write(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        needed = sum(len(content) for name, content in files if self._same_program(name, content) is None)
        try:
            self._make_room(needed)
            while True:
                try:
                    self._write_files(folder, files)
                    break
                except OSError as error:
                    # The disk may be full although the ring is within its limit.
                    if not self._delete_oldest():
                        raise CaptureError(
                            f"The ring of captures in {str(self.out)!r} cannot be written: "
                            f"{os.strerror(error.errno or 0)}. Free the disk, or name another directory."
                        ) from error
        except CaptureError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._stored = [each for each in self._stored if each.path != folder]
        self._stored.append(Stored(folder, _kind(folder.name), _files(folder)))
        self._limit_slow_steps()

    def keep_before(self, slow: Path) -> None:
        """Keeps the last capture of normal steps together with the capture of a slow step."""
        with self._changing:
            self._keep_before(slow)

    def _keep_before(self, slow: Path) -> None:
        older = [each for each in self._stored if each.kind == "normal"]
        if not older:
            return
        target = slow.with_name(f"{slow.name}{_BEFORE}")
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # deleted by the user
            older[-1].path.rename(target)
            self._stored = [each for each in self._stored if each.path not in (older[-1].path, target)]
            self._stored.append(Stored(target, "before", older[-1].files))
        self._programs.clear()  # their paths have changed

    def close(self) -> None:
        """Lets other processes write the ring."""
        os.close(self._lock)

    def _same_program(self, name: str, content: bytes) -> Path | None:
        """Returns the file of an earlier capture with the same program."""
        digest, path = self._programs.get(name, (0, None))
        return path if path is not None and digest == hash(content) and path.exists() else None

    def _write_files(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        folder.mkdir(exist_ok=True)
        for name, content in files:
            path, same = folder / name, self._same_program(name, content)
            if same is not None:
                with contextlib.suppress(OSError):  # a file system without links
                    path.unlink(missing_ok=True)
                    path.hardlink_to(same)
                    continue
            replace_file(path, content)
            if name.endswith(".hlo.pb"):
                self._programs[name] = hash(content), path

    def _make_room(self, needed_bytes: int) -> None:
        limit_bytes = self._limit_mb * _MEGABYTE
        while self.total_bytes + needed_bytes > limit_bytes:
            if not self._delete_oldest():
                kept_mb, needed_mb = self.total_bytes / _MEGABYTE, needed_bytes / _MEGABYTE
                raise CaptureError(
                    f"A capture of {needed_mb:.3g} MB does not fit into the ring of captures of {self._limit_mb:g} MB, "
                    f"of which kept slow steps take {kept_mb:.3g} MB. Set ring_mb to at least {2 * needed_mb:.2g}."
                )

    def _delete_oldest(self) -> bool:
        """Deletes the oldest capture of normal steps; returns False if there is none."""
        oldest = next((each for each in self._stored if each.kind == "normal"), None)
        if oldest is not None:
            self._delete(oldest)
        return oldest is not None

    def _limit_slow_steps(self) -> None:
        slow = [each for each in self._stored if each.kind == "slow"]
        # Only captures of earlier processes can exceed the limit, since this process saves at most as many.
        for each in slow[: max(len(slow) - self._slow_steps, 0)]:
            names = {each.path, each.path.with_name(f"{each.path.name}{_BEFORE}")}
            for old in [old for old in self._stored if old.path in names]:
                self._delete(old)

    def _delete(self, stored: Stored) -> None:
        # The trace first: readers ignore a folder without one.
        for path in stored.path.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)
        shutil.rmtree(stored.path, ignore_errors=True)
        self._stored.remove(stored)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically, by renaming a temporary file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _kind(name: str) -> str:
    if name.startswith(_NORMAL):
        return "normal"
    if name.startswith(_SLOW):
        return "before" if name.endswith(_BEFORE) else "slow"
    return ""


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


def _files(folder: Path) -> dict[int, int]:
    return {about.st_ino: about.st_size for about in (path.stat() for path in folder.iterdir())}
