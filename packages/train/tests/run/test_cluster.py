"""A run over two hosts of this machine, killed and stopped at random moments."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from stack_core.runtime.record import ClusterRecord

STEPS = 12
CONFIG = {
    "model": {
        "name": "llama",
        "vocab_size": 280,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 24,
        "dtype": "float32",
    },
    "data": {"seq_tokens": 16, "batch_size": 8, "validation_fraction": 0.0},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2, "keep": 10},
    "mesh": {"fsdp": 2},
    "cluster": {"hosts": 2, "silence_s": 8.0, "stopped_s": 1.0, "orphan_s": 120.0, "max_failures": 20},
}
LEAST_S = 0.05
LIMIT_S = 900


@dataclass(frozen=True)
class Blow:
    """One kill: of whom, with which signal, and when; `in_save` waits for a checkpoint that is being written."""

    victim: str
    number: signal.Signals
    after_s: float
    in_save: bool

    @classmethod
    def drawn(cls, seed):
        generator = random.Random(seed)
        victim = ("rank 0", "rank 1", "agent 0", "agent 1", "driver")[seed % 5]
        number = generator.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        return cls(victim, number, generator.uniform(0.0, 6.0), generator.random() < 0.4)


class Cluster:
    """Starts drivers of runs of one config, and knows their processes by a mark in their environment."""

    def __init__(self, root):
        self.root, self.mark = root, uuid.uuid4().hex
        texts = root / "texts"
        texts.mkdir()
        rng = np.random.default_rng(0)
        words = ["alpha", "beta", "gamma", "delta", "return", "yield", "(x)", "\n"]
        for number in range(20):
            (texts / f"{number}.txt").write_text(" ".join(rng.choice(words, 200)))
        data = CONFIG["data"] | {"source": f"text:{texts}/*.txt"}
        self.config = root / "run.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG | {"data": data}))

    def start(self, output, *arguments):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "STACK_TEST_MARK": self.mark,
        }
        command = [sys.executable, "-m", "stack_core", "train", str(self.config), "--output"]
        return subprocess.Popen(
            [*command, str(self.root / output), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def record(self, output):
        return ClusterRecord(self.root / output / "cluster")

    def marked(self):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"STACK_TEST_MARK={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def pid(self, output, victim, driver):
        """Of the newest process that the record names so."""
        if victim == "driver":
            return driver.pid
        kind, place = victim.split()
        name = {"rank": "worker", "agent": "agent"}[kind]
        notes = self.record(output).notes(name)
        return [note["pid"] for note in notes if note.get("rank", note["on"]) == int(place)][-1]

    def strike(self, output, driver, blow):
        """Waits for the moment of a blow; returns whether the run was still going."""
        record = self.record(output)
        wait_until(lambda: driver.poll() is not None or len(record.notes("worker")) >= 2)
        moment_s = time.monotonic() + blow.after_s
        saves = self.root / output / "checkpoints"
        in_save = lambda: blow.in_save and any(saves.glob("*tmp*"))
        wait_until(lambda: driver.poll() is not None or in_save() or (not blow.in_save and time.monotonic() > moment_s))
        if driver.poll() is not None:
            return False
        try:
            os.kill(self.pid(output, blow.victim, driver), blow.number)
        except ProcessLookupError:
            return False
        return True

    def digests(self, output):
        manifest = json.loads((self.root / output / "checkpoints" / f"{STEPS:08d}" / "manifest.json").read_text())
        return {name: leaf["digest"] for name, leaf in manifest["content"]["leaves"].items()}

    def losses(self, output):
        lines = (self.root / output / "metrics.jsonl").read_text().splitlines()
        return {(record["kind"], record["step"]): record["loss"] for record in map(json.loads, lines)}

    def assert_nothing_is_left(self, output):
        wait_until(lambda: not self.marked(), timeout_s=20)
        folder = self.root / output
        assert {path.name for path in (folder / "cluster").iterdir()} <= {
            "journal.sqlite",
            "driver.lock",
            "host-0.log",
            "host-1.log",
        }
        assert not [path for path in folder.rglob("*") if "tmp" in path.name or "partial" in path.name]


def wait_until(condition, timeout_s=LIMIT_S):
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(LEAST_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with a whole run."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    driver = cluster.start("whole")
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    yield cluster
    for pid in cluster.marked():
        os.kill(pid, signal.SIGKILL)


def assert_blamed(cluster, output, blow):
    """The record names the one that was struck; a driver's death is no failure of its workers."""
    failures = cluster.record(output).notes("failure")
    if blow.victim == "driver":
        assert failures == []
        return
    kind, place = blow.victim.split()
    [failure] = failures
    where = failure["rank"] if kind == "rank" else failure["failed_host"]
    expected = "lost host" if kind == "agent" else "signal" if blow.number is signal.SIGKILL else "stopped"
    assert (failure["cause"], where) == (expected, int(place)), failure


def survive(cluster, output, blow):
    driver = cluster.start(output)
    struck = cluster.strike(output, driver, blow)
    if blow.victim == "driver" and struck:
        second = cluster.start(output)
        said, _ = second.communicate(timeout=LIMIT_S)
        assert second.returncode == 0, said
        driver.wait(20)
        driver.stdout.close()
    else:
        said, _ = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, said
    cluster.assert_nothing_is_left(output)
    assert cluster.digests(output) == cluster.digests("whole"), said
    assert cluster.losses(output) == cluster.losses("whole"), said
    if struck:
        assert_blamed(cluster, output, blow)
    return struck


@pytest.mark.slow
def test_a_run_of_several_hosts_is_that_of_one_process_with_as_many_devices(cluster):
    assert len(cluster.record("whole").notes("formation")) == 1
    cluster.assert_nothing_is_left("whole")
    [end] = cluster.record("whole").notes("end")
    wall_s = end["time"] - cluster.record("whole").notes("session")[0]["time"]
    assert sum(end["seconds"].values()) == pytest.approx(wall_s, rel=0.01, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_whoever_is_struck_whenever_the_run_ends_bitwise_the_same(cluster, seed):
    blow = Blow.drawn(seed)
    survive(cluster, f"struck-{seed}", blow)


def newest_formation(record):
    return record.notes("formation")[-1]


def has_saved(record, driver):
    """Whether the newest formation has saved a checkpoint; True for a run that has ended."""
    started = newest_formation(record)["time"]
    saves = [note for note in record.notes("event") if note["event"] == "CheckpointSaved" and note["time"] > started]
    return bool(saves) or driver.poll() is not None


@pytest.mark.slow
def test_a_range_of_hosts_trains_as_a_fixed_number_does(cluster):
    """Three hosts do not divide the batch of 8 rows, so that two train, then one while the others start again."""
    steps = ("--run.steps", "60")
    driver = cluster.start("fixed", *steps)
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    ranged = ("--hosts", "1..3", "--mesh.fsdp", "-1", "--cluster.missing_s", "0.2")
    driver, record = cluster.start("ranged", *steps, *ranged), cluster.record("ranged")
    all_came = lambda: len({note["on"] for note in record.notes("agent")}) == 3
    wait_until(lambda: driver.poll() is not None or (record.notes("event") and all_came()))
    for _ in range(2):
        wait_until(lambda: has_saved(record, driver))
        for host in {newest_formation(record)["hosts"][-1], 2}:
            with contextlib.suppress(ProcessLookupError):  # it was killed before and is not back
                os.kill(cluster.pid("ranged", f"agent {host}", driver), signal.SIGKILL)
        number = newest_formation(record)["number"]
        wait_until(lambda number=number: driver.poll() is not None or newest_formation(record)["number"] > number)
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    assert {note["hosts"] for note in record.notes("unfit")} <= {3}
    unfit = {note["number"] for note in record.notes("unfit")}
    sizes = {len(note["hosts"]) for note in record.notes("formation") if note["number"] not in unfit}
    assert sizes == {1, 2}, said
    fixed, losses = cluster.losses("fixed"), cluster.losses("ranged")
    lines = (cluster.root / "ranged" / "metrics.jsonl").read_text().splitlines()
    assert list(losses) == list(fixed) and len(lines) == len(losses)
    assert list(losses.values()) == pytest.approx(list(fixed.values()), abs=1e-5)


@pytest.mark.slow
def test_replicas_and_smaller_batches_train_on_a_range_of_hosts(cluster):
    """Two replicas need an even number of hosts, and four hosts join two after a checkpoint."""
    outer, ramp = "{every_steps: 2, replicas: 2}", "[{rows: 4, steps: 20}]"
    settings = ("--run.steps", "40", "--optimizer.outer", outer, "--run.ramp", ramp)
    driver = cluster.start("fixed apart", *settings, "--mesh", "{data: 2, fsdp: 1}")
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    ranged = ("--hosts", "2..4", "--mesh", "{data: -1, fsdp: 1}", "--cluster.missing_s", "0.2")
    driver, record = cluster.start("ranged apart", *settings, *ranged), cluster.record("ranged apart")
    wait_until(lambda: driver.poll() is not None or (record.notes("formation") and has_saved(record, driver)))
    while driver.poll() is None and len(newest_formation(record)["hosts"]) != 4:
        time.sleep(LEAST_S)
    wait_until(lambda: has_saved(record, driver))
    with contextlib.suppress(ProcessLookupError):
        os.kill(cluster.pid("ranged apart", "agent 3", driver), signal.SIGKILL)
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    unfit = {note["number"]: note for note in record.notes("unfit")}
    assert {note["hosts"] for note in unfit.values()} <= {3}
    assert all("optimizer.outer.replicas is 2" in note["reason"] for note in unfit.values())
    sizes = {len(note["hosts"]) for note in record.notes("formation") if note["number"] not in unfit}
    assert sizes == {2, 4}, said
    fixed, losses = cluster.losses("fixed apart"), cluster.losses("ranged apart")
    assert list(losses) == list(fixed)
    assert list(losses.values()) == pytest.approx(list(fixed.values()), abs=1e-5)
