"""Clusters of real processes, and what must not be left of them."""

import os
import signal
import socket
import time
import uuid
from pathlib import Path

import pytest

from stack_core.runtime.config import ClusterConfig, parsed_address
from stack_core.runtime.record import ClusterRecord
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.supervised import Job, supervise

HERE = Path(__file__).parent


class Bench:
    """Runs jobs over two hosts of this machine, and kills on the way."""

    def __init__(self, root, mark):
        self.root, self.mark = root, mark
        self.config = ClusterConfig(hosts=2, silence_s=5.0, stopped_s=0.5, orphan_s=20.0, start_s=120.0)
        self.events = []

    def run(self, name, *, on_event=lambda event, record: None, stop=None, config=None, **arguments):
        """What `descend` returns in a run that `on_event` may disturb; also the record of its cluster."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        record = ClusterRecord(folder / "cluster")

        def observe(event):
            self.events.append(event)
            on_event(event, record)

        job = Job("gradient_job:descend", {**arguments, "folder": str(folder)}, ("gradient_job",))
        config = config or self.config
        return supervise(job, config, folder, observe=observe, stop=StopRequest() if stop is None else stop), record

    def processes(self):
        """The pids that bear the mark of this test, other than this process."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                marked = f"STACK_TEST_MARK={self.mark}".encode() in path.read_bytes()
            except OSError:
                continue
            if marked and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        return found

    def wait_until_gone(self):
        until_s = time.monotonic() + 10
        while self.processes() and time.monotonic() < until_s:
            time.sleep(0.1)
        assert self.processes() == []

    def assert_nothing_is_left(self, record):
        self.wait_until_gone()
        for session in record.notes("session"):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(parsed_address(session["address"]), timeout=1).close()
        kept = {"journal.sqlite", "driver.lock", *(f"host-{number}.log" for number in range(3))}
        assert {path.name for path in record.directory.iterdir()} <= kept
        assert not list(record.directory.parent.glob("*partial*"))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("STACK_TEST_MARK", mark)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    bench = Bench(tmp_path, mark)
    yield bench
    for pid in bench.processes():
        os.kill(pid, signal.SIGKILL)
