"""A journal: entries that survive the process that appended them, until they are acknowledged and forgotten.

Rollouts keep trajectories in one until a checkpoint has used them; a supervisor keeps what it did, so that another can
take over. The file is a SQLite database in WAL mode: one process appends, others may read meanwhile.
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
_APPLICATION = 0x5354434B  # "STCK", so that a foreign database is not taken for a journal
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
    """What was appended.

    Attributes:
      number: its place; numbers rise and are never used again.
      kind: of entry, a word of the caller's.
      key: at most one entry of a kind has it; None where the caller gave none.
      acknowledged: the number it was acknowledged with, such as a checkpoint's step; None while it waits.
    """

    number: int
    kind: str
    key: str | None
    payload: bytes
    acknowledged: int | None = None


class Journal:
    """The journal in a file, which is made where there is none.

    An entry is whole or absent, whatever moment the process is killed at; a call that returned is not undone. Methods
    may be called from any thread.

    Args:
      survives: what entries outlive: the end of the "process", at microseconds an entry, or that of the "machine" too,
        for which each call waits for the disk.

    Raises:
      JournalError: the file is no journal, of another format, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, survives: Literal["process", "machine"] = "process") -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with self._explaining("opened"):
            # Every statement is a transaction of its own, unless `_transaction` opens one around several.
            self._database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare("NORMAL" if survives == "process" else "FULL")
            except BaseException:  # the connection must not stay open, whatever ended the preparation
                self._database.close()
                raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def append(self, kind: str, payload: bytes, *, key: str | None = None) -> bool:
        """Appends an entry.

        Returns:
          False if the kind has an entry with this key; that one stays as it is.

        Raises:
          JournalError: the disk is full, or the file was closed or damaged.
        """
        return self.append_all(kind, [(key, payload)]) == 1

    def append_all(self, kind: str, entries: Iterable[tuple[str | None, bytes]]) -> int:
        """Appends entries, given as (key, payload), all of them or none.

        Returns:
          How many are new; one whose key is there is left out.
        """
        rows = [(kind, key, payload, zlib.crc32(payload)) for key, payload in entries]
        statement = "INSERT OR IGNORE INTO entries (kind, key, payload, crc) VALUES (?, ?, ?, ?)"
        with self._transaction() as database:
            before = database.total_changes
            database.executemany(statement, rows)
            return database.total_changes - before

    def read(self, kind: str | None = None, *, waiting: bool = False, after: int = 0) -> list[Entry]:
        """Returns entries in the order in which they were appended.

        Args:
          kind: None returns those of all kinds.
          waiting: leave out what is acknowledged.
          after: leave out entries up to this number.

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
        """Marks entries as used; one that is acknowledged already keeps its number, and keys without one are ignored.

        Args:
          number: by what, such as the step of the checkpoint that holds what came of them.
        """
        rows = [(number, kind, key) for key in keys]
        statement = "UPDATE entries SET acknowledged = ? WHERE kind = ? AND key = ? AND acknowledged IS NULL"
        with self._transaction() as database:
            database.executemany(statement, rows)

    def retract(self, kind: str, *, after: int) -> None:
        """Makes entries wait again that were acknowledged with a number greater than `after`."""
        statement = "UPDATE entries SET acknowledged = NULL WHERE kind = ? AND acknowledged > ?"
        with self._transaction() as database:
            database.execute(statement, (kind, after))

    def forget(self, kind: str, *, through: int) -> int:
        """Deletes entries that were acknowledged with a number of at most `through`; returns how many."""
        with self._transaction() as database:
            found = database.execute("DELETE FROM entries WHERE kind = ? AND acknowledged <= ?", (kind, through))
            return found.rowcount

    def drop(self, numbers: Iterable[int]) -> None:
        """Deletes entries by their numbers, acknowledged or not."""
        with self._transaction() as database:
            database.executemany("DELETE FROM entries WHERE number = ?", [(number,) for number in numbers])

    def close(self) -> None:
        """Ends the use of the file; calling it again does nothing."""
        with self._explaining("closed"), self._lock:
            self._database.close()

    def _prepare(self, synchronous: str) -> None:
        database = self._database
        database.execute("BEGIN")  # one snapshot, for another process may make the journal meanwhile
        try:
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
        finally:
            database.execute("ROLLBACK")
        if application not in (0, _APPLICATION) or (application == 0 and tables):
            raise JournalError(f"{self.path} is a database of another program. Name another file.")
        if application and version != _FORMAT:
            raise JournalError(
                f"{self.path} has format {version}; this version of stack-core reads {_FORMAT}. Go on with the version "
                "that wrote it, or remove the file, which loses what waits in it."
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
        """One change of the file, which happens as a whole."""
        with self._explaining("written"), self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:  # Ctrl-C, too: half of a change must not stay.
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _explaining(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"The journal {self.path} cannot be {done}: {error}. {_REMEDY}") from error


_REMEDY = (
    "Look whether the disk is full and the file writable; a damaged journal may be removed, which loses what waits in "
    "it."
)
