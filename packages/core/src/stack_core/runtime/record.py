"""The on-disk record of a cluster: its driver, events, and the output of its workers.

OUTPUT/cluster/
├── journal.sqlite   sessions, formations, failures, time by activity
├── driver.lock      locked by the driver; contains its pid
├── token            the secret of a running cluster; deleted when it ends
└── host-0.log       output of the workers of a host
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.errors import ClusterError, ConfigError
from stack_core.runtime.journal import Journal
from stack_core.runtime.zygote import state_of

__all__ = ["ClusterRecord", "read_token"]

_BUSY_S = 3.0  # a killed driver holds its lock until the kernel has removed the process


class ClusterRecord:
    """The directory of a cluster's record; constructing one touches no file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal: Journal | None = None

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Creates the directory and holds its lock for the cluster's only driver.

        A driver that a signal has stopped is killed and replaced, since nobody would notice failures of its workers.

        Raises:
          ClusterError: another driver is running.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.directory / "driver.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take(descriptor)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            with Journal(self.directory / "journal.sqlite") as self._journal:
                yield
        finally:
            self._journal = None
            os.close(descriptor)

    def note(self, kind: str, *, replace: bool = False, **fields: Any) -> None:
        """Appends {"time": seconds since 1970, **fields} to the journal; `replace` deletes older entries."""
        assert self._journal is not None, "only its driver writes"
        before = [entry.number for entry in self._journal.read(kind)] if replace else []
        self._journal.append(kind, json.dumps({"time": time.time(), **fields}).encode())
        # After the append, so a killed driver leaves at least one entry.
        self._journal.drop(before)

    def notes(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the journal's entries, each with its "kind", oldest first; empty if there was no cluster."""
        if self._journal is not None:
            return _decoded(self._journal, kind)
        if not self.exists():
            return []
        with Journal(self.directory / "journal.sqlite") as journal:
            return _decoded(journal, kind)

    def latest_run(self) -> list[dict[str, Any]]:
        """Returns the entries of the latest run since its first session, across all drivers that attached."""
        notes = self.notes()
        ends = [place for place, note in enumerate(notes[:-1]) if note["kind"] == "end"]
        return notes[ends[-1] + 1 :] if ends else notes

    def exists(self) -> bool:
        return (self.directory / "journal.sqlite").exists()

    def unfinished(self) -> dict[str, Any] | None:
        """Returns the session of a driver that left no end, if its agents may still be running."""
        last = next((each for each in reversed(self.notes()) if each["kind"] in ("session", "end")), None)
        return last if last is not None and last["kind"] == "session" and self._token_path.exists() else None

    def driver_pid(self) -> int | None:
        """Returns the pid of the current driver, or None."""
        path = self.directory / "driver.lock"
        if not path.exists():
            return None
        until_s = time.monotonic() + _BUSY_S
        with path.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    pid, _ = _holder(file.fileno())
                    if pid is not None or time.monotonic() > until_s:
                        return pid
                    time.sleep(0.02)  # the holder has not written its pid yet
                else:
                    return None

    def token(self, path: str | None) -> bytes:
        """Returns the cluster's token: from the user's file, from the unfinished session, or a new one."""
        if path is not None:
            return read_token(Path(path))
        if self._token_path.exists():
            return read_token(self._token_path)
        token = secrets.token_bytes(32)
        # A new file, because an existing one might be readable by others.
        descriptor = os.open(self._token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token.hex())
        return token

    def finish(self) -> None:
        """Removes files that only a running cluster needs."""
        for name in ("token",):
            (self.directory / name).unlink(missing_ok=True)

    def log(self, host: int, text: str) -> None:
        with (self.directory / f"host-{host}.log").open("a", encoding="utf-8") as file:
            file.write(text)

    @property
    def _token_path(self) -> Path:
        return self.directory / "token"

    def _take(self, descriptor: int) -> None:
        until_s = time.monotonic() + _BUSY_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid, host = _holder(descriptor)
                if pid is not None and host == socket.gethostname() and state_of(pid) == "T":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                elif time.monotonic() > until_s:
                    raise ClusterError(
                        f"The cluster of {self.directory.parent} is driven by the process with pid "
                        f"{pid or 'unknown'}. Watch it with `stack cluster status`, or stop it first."
                    ) from error
                time.sleep(0.02)
                continue
            return


def _holder(descriptor: int) -> tuple[int | None, str]:
    """Returns the pid and host name in a driver's lock; the pid is None until it is written."""
    pid, _, host = os.pread(descriptor, 300, 0).decode().strip().partition(" ")
    return (int(pid) if pid.isdecimal() else None), host


def read_token(path: Path) -> bytes:
    """Reads a hexadecimal token from a file.

    Raises:
      ConfigError: the file cannot be read, or the token is shorter than 16 bytes.
    """
    try:
        token = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The token file {path} cannot be read: {error}. It holds hexadecimal digits.") from error
    if len(token) < 16:
        raise ConfigError(f"The token in {path} has {len(token)} bytes; expected 16 or more. `openssl rand -hex 32`.")
    return token


def _decoded(journal: Journal, kind: str | None) -> list[dict[str, Any]]:
    return [{"kind": entry.kind, **json.loads(entry.payload)} for entry in journal.read(kind)]
