"""The directory that a run owns, and the lock that admits one writing process at a time.

A run called small:

    runs/small/
    ├── config.yaml     the resolved config; written last, hence its presence marks a run
    ├── failed.yaml     the config of a run that failed without a checkpoint; another run may start here
    ├── tokenizer/
    ├── checkpoints/
    ├── metrics.jsonl
    ├── history.jsonl   when and how the run started, resumed and ended
    ├── goodput.jsonl   wall time of each session by activity
    ├── report.html     curves and a summary, written at evaluations and at the end
    ├── changes.jsonl   config changes at resumption, if any
    ├── ops.json        the implementation chosen for each call of an op, with the reason
    ├── files.json      the files that contain its data, with their sizes
    ├── cluster/        only for a run over several hosts: its journal and its workers' output
    └── run.lock        locked by flock(2), which the kernel releases however the holder ends
"""

import contextlib
import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import RunDirectoryError

__all__ = ["RunDirectory"]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run and its write lock; constructing one touches no file.

    Attributes:
      path: the directory.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ops(self) -> Path:
        return self.path / "ops.json"

    @property
    def files(self) -> Path:
        return self.path / "files.json"

    @property
    def _lock(self) -> Path:
        return self.path / "run.lock"

    def config_yaml(self) -> str:
        """Returns the resolved config of the run in this directory.

        Raises:
          RunDirectoryError: the directory holds no run, or its config cannot be read.
        """
        try:
            return self.config.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"{self.path} holds no run: it has no {self.config.name}. Give the output of a run."
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{self.config} cannot be read: {error}. Give the directory of a run.") from error

    def check(self, *, resume: bool) -> None:
        """Checks that the directory can be used, without writing.

        Args:
          resume: whether to resume the run in the directory; otherwise there must not be a run.

        Raises:
          RunDirectoryError: it is locked, holds another run or foreign files, or there is nothing to resume.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"The run directory {self.path} is a file. Choose another output.")
        if self._lock.exists():
            with self._opened_lock(os.O_RDONLY) as descriptor:
                self._acquire(descriptor)
        self._check_content(resume=resume)

    @contextlib.contextmanager
    def open(self, *, resume: bool) -> Iterator[None]:
        """Creates the directory and holds its lock inside the block.

        Raises:
          RunDirectoryError: as `check`, or the directory cannot be written.
        """
        self.check(resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"Directory {self.path} cannot be created: {error}. Set another output.") from error
        with self._opened_lock(os.O_RDWR | os.O_CREAT) as descriptor:
            self._acquire(descriptor)
            try:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            except OSError as error:
                raise RunDirectoryError(f"The run directory {self.path} cannot be written: {error}") from error
            self._check_content(resume=resume)  # again: the content may have changed before the lock was acquired
            yield

    def write(self, config_yaml: str, write_files: Callable[[Path], None] | None = None) -> None:
        """Writes the data's files and then the config, each atomically.

        Args:
          write_files: writes into the directory, as `Batches.write` does.

        Raises:
          RunDirectoryError: the disk is full or the directory is not writable.
        """
        try:
            if write_files is not None:
                write_files(self.path)
            partial = self.path / "config.yaml.partial"
            partial.write_text(config_yaml, encoding="utf-8")
            partial.replace(self.config)
        except OSError as error:
            raise RunDirectoryError(f"The run directory {self.path} cannot be written: {error}") from error

    def write_json(self, path: Path, value: Any) -> None:
        """Writes one of the run's files, such as `ops`, atomically.

        Raises:
          RunDirectoryError: the disk is full or the directory is not writable.
        """
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error}") from error

    def read_json(self, path: Path) -> Any:
        """Reads a file of the run; returns None without the file, and None with a warning for a damaged file."""
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} cannot be read, so changes since then are not reported: {error}.", stacklevel=2)
            return None

    def release(self) -> None:
        """Frees the directory for another run by renaming the config to failed.yaml."""
        if self.config.exists():
            self.config.replace(self.path / "failed.yaml")

    def note_changes(self, changes: Sequence[str]) -> None:
        """Appends the config changes of a resumed run to `changes.jsonl`: {"time": ..., "changes": [...]}."""
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "changes": list(changes)}
        with (self.path / "changes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _check_content(self, *, resume: bool) -> None:
        if resume and not self.config.exists():
            raise RunDirectoryError(
                f"There is nothing to resume: {self.path} holds no run. Omit --resume to start one."
            )
        if not resume and self.config.exists():
            raise RunDirectoryError(
                f"{self.path} holds another run. Continue it with --resume, or choose another output."
            )
        # Files next to a lock without a config are leftovers of a failed start. Any other content is foreign, except
        # the record of the cluster that is about to execute the run.
        foreign = self.path.exists() and any(each.name != "cluster" for each in self.path.iterdir())
        if not resume and foreign and not self._lock.exists():
            raise RunDirectoryError(f"{self.path} is not empty and holds no run. Choose a new or empty output.")

    @contextlib.contextmanager
    def _opened_lock(self, flags: int) -> Iterator[int]:
        try:
            descriptor = os.open(self._lock, flags, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"The lock {self._lock} cannot be opened: {error}") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> None:
        """Holds the lock until the descriptor is closed."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise RunDirectoryError(
                f"{self.path} is in use by the process with pid {holder}. Wait until it ends, or stop it."
            ) from error
