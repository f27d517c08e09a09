"""Journals: what is kept through a kill, by key, until it is acknowledged and forgotten."""

import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from stack_core.abi.errors import JournalError
from stack_core.runtime.journal import Entry, Journal


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


def keys(journal, **options):
    return [each.key for each in journal.read("a", **options)]


def test_entries_are_read_in_the_order_in_which_they_came_and_once_by_key(journal):
    assert journal.append("a", b"one", key="1") and journal.append("b", b"other", key="1")
    assert not journal.append("a", b"again", key="1")
    assert journal.append_all("a", [("1", b"again"), ("2", b"two"), (None, b""), (None, b"")]) == 3
    assert journal.read("a")[0] == Entry(1, "a", "1", b"one")
    assert [each.payload for each in journal.read()] == [b"one", b"other", b"two", b"", b""]
    assert keys(journal, after=1) == ["2", None, None]


def test_what_is_acknowledged_waits_no_more_and_can_be_forgotten_or_wait_again(journal):
    journal.append_all("a", [(str(number), b"") for number in range(6)])
    journal.acknowledge("a", ["0", "1", "absent"], 10)
    journal.acknowledge("a", ["1", "2", "3"], 20)
    assert keys(journal, waiting=True) == ["4", "5"]
    assert {each.key: each.acknowledged for each in journal.read("a")} == {
        "0": 10, "1": 10, "2": 20, "3": 20, "4": None, "5": None,
    }  # fmt: skip
    journal.retract("a", after=10)
    assert keys(journal, waiting=True) == ["2", "3", "4", "5"]
    assert journal.forget("a", through=10) == 2 and keys(journal) == ["2", "3", "4", "5"]
    journal.drop([each.number for each in journal.read("a", after=4)])
    assert keys(journal) == ["2", "3"]
    journal.append("a", b"", key="new")
    assert journal.read("a")[-1].number > 6  # a number is never used again


def test_a_reader_sees_what_a_writer_appends_meanwhile(journal):
    with Journal(journal.path) as reader:
        journal.append("a", b"x", key="k")
        assert [each.payload for each in reader.read("a")] == [b"x"]


class Interrupted(sqlite3.Connection):
    """Lets another make the journal before its statement number `moment`, unless it holds a lock by then."""

    moment, maker, statements = 0, None, 0

    def execute(self, *arguments):
        if self.statements == self.moment:
            self.maker.start()
            self.maker.join(0.2)
        self.statements += 1
        return super().execute(*arguments)


@pytest.mark.parametrize("moment", range(4))
def test_two_make_a_journal_at_once(tmp_path, monkeypatch, moment):
    def make():
        with Journal(tmp_path / "journal.sqlite") as journal:
            journal.append("a", b"x")

    connect = sqlite3.connect
    factories = iter([Interrupted])  # of the first connection alone
    monkeypatch.setattr(Interrupted, "moment", moment)
    monkeypatch.setattr(Interrupted, "maker", maker := threading.Thread(target=make))
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda *names, **options: connect(*names, factory=next(factories, sqlite3.Connection), **options),
    )
    make()
    maker.join()
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert [each.payload for each in journal.read("a")] == [b"x", b"x"]


def test_threads_append_side_by_side(journal):
    def work(name):
        for number in range(50):
            journal.append("a", b"x", key=f"{name}-{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(keys(journal))) == 200


CHILD = """
import sys
from stack_core.runtime.journal import Journal
journal = Journal(sys.argv[1])
for number in range(1_000_000):
    journal.append_all("a", [(f"{number}-{part}", bytes(100)) for part in range(3)])
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_groups_and_all_that_it_was_told_of(tmp_path):
    path = tmp_path / "journal.sqlite"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(50)]
        child.send_signal(signal.SIGKILL)
        told += [int(line) for line in child.stdout.read().splitlines() if line.strip()]
    with Journal(path) as journal:
        found = keys(journal)
    assert len(found) % 3 == 0 and len(found) >= 3 * len(told)
    assert found == [f"{number}-{part}" for number in range(len(found) // 3) for part in range(3)]


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be taken for a header " * 20)
    with pytest.raises(JournalError, match=r"text cannot be opened: file is not a database"):
        Journal(text)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE things (name)")
    other.close()
    with pytest.raises(JournalError, match="database of another program"):
        Journal(tmp_path / "other")
    with pytest.raises(JournalError, match="unable to open database file"):
        Journal(tmp_path / "absent" / "journal")


def test_another_format_and_a_damaged_entry_are_refused(journal):
    journal.append("a", b"payload", key="k")
    other = sqlite3.connect(journal.path)
    other.execute("UPDATE entries SET payload = ?", (b"another",))
    other.commit()
    with pytest.raises(JournalError, match="differs from its checksum"):
        journal.read()
    other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(JournalError, match="has format 9; this version of stack-core reads 1"):
        Journal(journal.path)


def test_half_of_a_change_does_not_stay(journal):
    def entries():
        yield "1", b""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.append_all("a", entries())
    journal._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
    with pytest.raises(JournalError, match="cannot be written"):
        journal.append_all("a", [("1", b""), (None, bytes(2000))])  # SQLite refuses the second
    assert journal.read() == [] and journal.append("a", b"", key="1")


def test_a_closed_journal_says_so(tmp_path):
    journal = Journal(tmp_path / "journal", survives="machine")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="Cannot operate on a closed database"):
        journal.append("a", b"")
