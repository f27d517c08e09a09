"""A journal: durable entries that outlive the appending process, until they are acknowledged and deleted.

Rollouts keep trajectories in it until a checkpoint has used them; a supervisor records its actions for a successor. The
file is a SQLite database in WAL mode: one process appends, others may read concurrently.
"""

import contextlib
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stack_core.abi.errors import JournalError

__all__ = ["Entry", "Journal"]

_FORMAT = 1
_APPLICATION = 0x5354434B  # "STCK", to recognize foreign databases
_BUSY_S = 30.0
_TABLE = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    key TEXT,
    payload BLOB NOT NULL,
    crc INTEGER NOT NULL,
    acknowledged INTEGER,
    UNIQUE (kind, key)
)
"""


@dataclass(frozen=True)
class Entry:
    """An entry of the journal.

    Attributes:
      number: unique, ascending number; never reused.
      kind: category chosen by the caller.
      key: unique key within the kind, or None.
      payload: content.
      acknowledged: number passed to `acknowledge`, such as a checkpoint's step; None while the entry waits.
    """

    number: int
    kind: str
    key: str | None
    payload: bytes
    acknowledged: int | None = None


class Journal:
    """The journal in a file, created if missing.

    An entry is complete or absent at whatever moment the process is killed; a call that returned is durable. Methods
    may be called from any thread.

    Args:
      survives: durability of entries: "process" survives the end of the process and takes microseconds per entry;
        "machine" also survives a crash of the machine, and each call waits for the disk.

    Raises:
      JournalError: the file is not a journal, has another format, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, survives: Literal["process", "machine"] = "process") -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with self._explaining("opened"):
            # Every statement is a transaction of its own, unless `_transaction` opens one around several.
            self._database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare("NORMAL" if survives == "process" else "FULL")
            except BaseException:  # close the connection after any failure
                self._database.close()
                raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def append(self, kind: str, payload: bytes, *, key: str | None = None) -> bool:
        """Appends an entry.

        Returns:
          False if the kind already has an entry with this key, which stays unchanged.

        Raises:
          JournalError: the disk is full, or the file was closed or damaged.
        """
        return self.append_all(kind, [(key, payload)]) == 1

    def append_all(self, kind: str, entries: Iterable[tuple[str | None, bytes]]) -> int:
        """Appends entries, given as (key, payload), in one transaction.

        Returns:
          Number of new entries; entries with an existing key are skipped.
        """
        # SQLite does not verify the content of its pages.
        rows = [(kind, key, payload, zlib.crc32(payload)) for key, payload in entries]
        statement = "INSERT OR IGNORE INTO entries (kind, key, payload, crc) VALUES (?, ?, ?, ?)"
        with self._transaction() as database:
            before = database.total_changes
            database.executemany(statement, rows)
            return database.total_changes - before

    def read(self, kind: str | None = None, *, waiting: bool = False, after: int = 0) -> list[Entry]:
        """Returns entries in the order in which they were appended.

        Args:
          kind: kind of the entries; None returns all kinds.
          waiting: whether to skip acknowledged entries.
          after: number up to which entries are skipped.

        Raises:
          JournalError: an entry differs from its checksum.
        """
        columns = "number, kind, key, payload, acknowledged, crc"
        conditions = "number > ? AND (? IS NULL OR kind = ?) AND (NOT ? OR acknowledged IS NULL)"
        with self._explaining("read"), self._lock:
            found = self._database.execute(
                f"SELECT {columns} FROM entries WHERE {conditions} ORDER BY number",
                (after, kind, kind, waiting),
            ).fetchall()
        for *_, payload, _, crc in found:
            if zlib.crc32(payload) != crc:
                raise JournalError(f"{self.path} is damaged: an entry differs from its checksum. {_REMEDY}")
        return [Entry(*fields) for *fields, _ in found]

    def acknowledge(self, kind: str, keys: Iterable[str], number: int) -> None:
        """Marks entries as used. Acknowledged entries keep their first number, and unknown keys are ignored.

        Args:
          number: identifies the user, such as the step of the checkpoint that contains the result.
        """
        rows = [(number, kind, key) for key in keys]
        statement = "UPDATE entries SET acknowledged = ? WHERE kind = ? AND key = ? AND acknowledged IS NULL"
        with self._transaction() as database:
            database.executemany(statement, rows)

    def retract(self, kind: str, *, after: int) -> None:
        """Makes entries wait again if they were acknowledged with a number greater than `after`."""
        statement = "UPDATE entries SET acknowledged = NULL WHERE kind = ? AND acknowledged > ?"
        with self._transaction() as database:
            database.execute(statement, (kind, after))

    def forget(self, kind: str, *, through: int) -> int:
        """Deletes entries acknowledged with a number of at most `through`; returns their count."""
        with self._transaction() as database:
            found = database.execute("DELETE FROM entries WHERE kind = ? AND acknowledged <= ?", (kind, through))
            return found.rowcount

    def drop(self, numbers: Iterable[int]) -> None:
        """Deletes entries by number, acknowledged or not."""
        with self._transaction() as database:
            database.executemany("DELETE FROM entries WHERE number = ?", [(number,) for number in numbers])

    def close(self) -> None:
        """Closes the file; further calls do nothing."""
        with self._explaining("closed"), self._lock:
            self._database.close()

    def _prepare(self, synchronous: str) -> None:
        database = self._database
        database.execute("BEGIN")  # one snapshot, since another process may create the journal concurrently
        try:
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
        finally:
            database.execute("ROLLBACK")
        if application not in (0, _APPLICATION) or (application == 0 and tables):
            raise JournalError(f"{self.path} is a database of another program. Use another file.")
        if application and version != _FORMAT:
            raise JournalError(
                f"{self.path} has format {version}; this version of stack-core reads {_FORMAT}. Continue with the "
                "version that wrote it, or remove the file, which loses its unacknowledged entries."
            )
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        if not application:
            with self._transaction():
                database.execute(_TABLE)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_FORMAT}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Wraps a change of the file in a transaction."""
        with self._explaining("written"), self._lock:
            # Takes the write lock now: the upgrade of a read lock would fail if another process writes.
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:  # including Ctrl-C: no partial change may remain
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _explaining(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"The journal {self.path} cannot be {action}: {error}. {_REMEDY}") from error


_REMEDY = (
    "Check that the disk is not full and the file is writable. A damaged journal can be removed, which loses its "
    "unacknowledged entries."
)
