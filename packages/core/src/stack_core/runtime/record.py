"""What a cluster leaves on disk: who drives it, what happened, and what its workers printed.

OUTPUT/cluster/
├── journal.sqlite   sessions, formations, failures, where the time went
├── driver.lock      held by the driver, with its pid
├── token            the secret of a cluster that is running; gone when it ends
└── host-0.log       what the workers of a host printed
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

_BUSY_S = 3.0  # a driver that is killed holds its lock until the kernel has ended it


class ClusterRecord:
    """The directory of a cluster's record; making one touches nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal: Journal | None = None

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """Makes the directory and holds it, for the one driver of a cluster.

        A driver that a signal has stopped is ended and followed, as nobody would hear of what happens to its workers.

        Raises:
          ClusterError: another driver is at work.
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

    def note(self, kind: str, *, alone: bool = False, **facts: Any) -> None:
        """Appends to the journal: {"time": seconds since 1970, and the facts}; `alone` forgets the last of its kind."""
        assert self._journal is not None, "only its driver writes"
        before = [entry.number for entry in self._journal.read(kind)] if alone else []
        self._journal.append(kind, json.dumps({"time": time.time(), **facts}).encode())
        self._journal.drop(before)

    def notes(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the journal holds, each with its "kind", oldest first; empty where there was no cluster."""
        if self._journal is not None:
            return _decoded(self._journal, kind)
        if not self.exists():
            return []
        with Journal(self.directory / "journal.sqlite") as journal:
            return _decoded(journal, kind)

    def latest_run(self) -> list[dict[str, Any]]:
        """The notes of the latest run, from its first session on, whichever drivers attached to it since."""
        notes = self.notes()
        ends = [place for place, note in enumerate(notes[:-1]) if note["kind"] == "end"]
        return notes[ends[-1] + 1 :] if ends else notes

    def exists(self) -> bool:
        return (self.directory / "journal.sqlite").exists()

    def unfinished(self) -> dict[str, Any] | None:
        """The session that a driver left without an end, whose agents may still be there."""
        last = next((each for each in reversed(self.notes()) if each["kind"] in ("session", "end")), None)
        return last if last is not None and last["kind"] == "session" and self._token_path.exists() else None

    def driver_pid(self) -> int | None:
        """The process that drives the cluster now; None when none does."""
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
                    time.sleep(0.02)  # it has the lock, and is about to write its pid
                else:
                    return None

    def token(self, given: str | None) -> bytes:
        """The token of the cluster: of a file that the user gave, of the unfinished session, or a new one."""
        if given is not None:
            return read_token(Path(given))
        if self._token_path.exists():
            return read_token(self._token_path)
        token = secrets.token_bytes(32)
        descriptor = os.open(self._token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token.hex())
        return token

    def finish(self) -> None:
        """Removes what only a running cluster needs."""
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
    """The pid and the host in a driver's lock; no pid before it is written."""
    pid, _, host = os.pread(descriptor, 300, 0).decode().strip().partition(" ")
    return (int(pid) if pid.isdecimal() else None), host


def read_token(path: Path) -> bytes:
    """The token in a file, hexadecimal.

    Raises:
      ConfigError: it cannot be read, or is shorter than 16 bytes.
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
