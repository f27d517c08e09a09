"""Who drives a cluster: one process, known by its lock; one that is stopped is followed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from stack_core.abi.errors import ClusterError, ConfigError
from stack_core.runtime import supervised
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.journal import Journal
from stack_core.runtime.record import ClusterRecord, read_token
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.supervised import Job, supervise
from stack_core.runtime.zygote import state_of

DRIVER = """
import sys, time
from pathlib import Path
from stack_core.runtime.record import ClusterRecord
with ClusterRecord(Path(sys.argv[1])).driving():
    print("driving", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another driver of the same cluster."""
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "cluster")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"driving\n"
        yield process
        process.kill()


def test_a_second_driver_is_refused_while_the_first_is_at_work(other, tmp_path):
    record = ClusterRecord(tmp_path / "cluster")
    assert record.driver_pid() == other.pid
    with pytest.raises(ClusterError, match=f"driven by the process with pid {other.pid}"), record.driving():
        pass


def test_a_driver_that_was_stopped_is_ended_and_followed(other, tmp_path):
    other.send_signal(signal.SIGSTOP)
    while state_of(other.pid) != "T":
        time.sleep(0.01)
    record = ClusterRecord(tmp_path / "cluster")
    with record.driving():
        assert other.wait(10) == -signal.SIGKILL
        assert record.driver_pid() == os.getpid()
    assert record.driver_pid() is None


def test_a_suspended_driver_lives_on_when_the_run_that_follows_is_refused(other, tmp_path):
    record = ClusterRecord(tmp_path / "cluster")
    record.token(None)
    with Journal(tmp_path / "cluster" / "journal.sqlite") as journal:
        journal.append("session", json.dumps({"time": 1.0, "hosts": 1, "arguments": {"seed": 1}}).encode())
    other.send_signal(signal.SIGSTOP)
    while state_of(other.pid) != "T":
        time.sleep(0.01)
    job, config = Job("none:none", {"seed": 2, "resume": True}), ClusterConfig(hosts=1)
    with pytest.raises(ClusterError, match=r"unfinished run in .* has another config .*\n  seed: 2, not 1\n"):
        supervise(job, config, tmp_path, observe=print, stop=StopRequest())
    same, tokenless = Job("none:none", {"seed": 1}), dataclasses.replace(config, token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="token file"):
        supervise(same, tokenless, tmp_path, observe=print, stop=StopRequest())
    assert state_of(other.pid) == "T"


def test_time_without_a_driver_is_counted_by_a_clock_that_nobody_sets(monkeypatch):
    ledger = {"at_s": time.monotonic() - 5, "boot": supervised._boot_id(), "time": time.time() + 7200}
    assert 5 <= supervised._since_s(ledger) < 65
    assert supervised._since_s({**ledger, "boot": "another machine's"}) == 0
    assert 5 <= supervised._since_s({**ledger, "boot": "another machine's", "time": time.time() - 5}) < 65


def test_a_session_without_an_end_is_unfinished_as_long_as_its_token_is_there(tmp_path):
    record = ClusterRecord(tmp_path / "cluster")
    with record.driving():
        assert record.unfinished() is None
        token = record.token(None)
        record.note("session", address="127.0.0.1:5")
        assert len(token) == 32 == len(record.token(None)) and record.token(None) == token
        assert (tmp_path / "cluster" / "token").stat().st_mode & 0o077 == 0
        assert record.unfinished()["address"] == "127.0.0.1:5"
        record.note("end", how="finished")
        assert record.unfinished() is None
        record.finish()
        assert not (tmp_path / "cluster" / "token").exists()


def test_a_token_must_be_long_enough_and_readable(tmp_path):
    path = tmp_path / "token"
    for text, part in (("ab", "has 1 bytes"), ("no token", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=part):
            read_token(path)
