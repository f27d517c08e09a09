"""How long a run stands still after a worker is killed, on this repository's runtime and on Ray's JaxTrainer.

    nox -s bench -- recovery --kills 5 --ray-python ENVIRONMENT/bin/python

The same small steps over two processes of this machine; a random worker is killed with SIGKILL at a random step.
"Noticed" is when the worker that was left is ended too, "workers again" when the first new process begins, "training
again" when the first new step is done: all from the kill, by the processes themselves and what they write to a file.
Without `--ray-python`, an interpreter with ray[train] and jax, Ray is left out.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import RESULTS, circumstances, table, write

PEERS = Path(__file__).parent / "peers"
STEPS_BETWEEN = 20
MEASURED = ("noticed", "workers again", "training again")
RUN = """
import sys
from pathlib import Path
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.supervised import Job, supervise
job = Job("recovery_job:worker", {"folder": sys.argv[1], "steps": int(sys.argv[2])}, ("recovery_job", "jax"))
config = ClusterConfig(hosts=2, max_failures=100)
supervise(job, config, Path(sys.argv[1]), observe=lambda event: None, stop=StopRequest())
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--ray-python", help="an interpreter with ray[train] and jax")
    options = parser.parse_args(arguments)
    sides: dict[str, Sequence[str]] = {"stack": [sys.executable, "-c", RUN]}
    if options.ray_python:
        sides["Ray JaxTrainer"] = [options.ray_python, str(PEERS / "recovery_job.py")]
    found = {name: measured(command, options.kills) for name, command in sides.items()}
    rows = [
        [
            name,
            str(len(times["noticed"])),
            *(spread(times[what]) for what in MEASURED),
        ]
        for name, times in found.items()
    ]
    lines = table(["", "kills", *(f"{what}, s" for what in MEASURED)], rows)
    around = circumstances()
    title = f"Recovery from a killed worker, {around['date']}, {around['machine']['cpus']} CPUs; median (least-most)"
    write(RESULTS, "recovery", {**around, "seconds": found}, "\n".join([title, "", *lines, ""]))


def measured(command: Sequence[str], kills: int) -> dict[str, list[float]]:
    """Seconds from each kill, by what they are until."""
    generator = random.Random(0)
    times: dict[str, list[float]] = {what: [] for what in MEASURED}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PEERS)}
        environment["RAY_raylet_start_wait_time_s"] = "180"
        steps = STEPS_BETWEEN * (kills + 1)
        process = subprocess.Popen([*command, name, str(steps)], env=environment)
        log = Log(folder / "log.jsonl", process)
        for number in range(kills):
            at_step = number * STEPS_BETWEEN + generator.randint(5, 15)
            log.wait(lambda notes, at_step=at_step: any(note.get("step", 0) >= at_step for note in notes))
            rank = generator.randrange(2)
            killed, left = log.pid_of(rank), log.pid_of(1 - rank)
            os.kill(killed, signal.SIGKILL)
            killed_s = time.time()
            times["noticed"].append(when_ended(left) - killed_s)
            for what, event in (("workers again", "start"), ("training again", "step")):
                times[what].append(log.wait_for_new(event, after_s=killed_s) - killed_s)
        log.wait(lambda notes: sum(note["event"] == "done" for note in notes) >= 2)
        digests = {note["digest"] for note in log.notes() if note["event"] == "done"}
        assert len(digests) == 1, "the processes disagree"
        process.wait(60)
    return times


class Log:
    """What the workers of a run have told so far."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path, self.process = path, process

    def notes(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def pid_of(self, rank: int) -> int:
        """The process that has a rank now."""
        return [note["pid"] for note in self.notes() if note["event"] == "start" and note["rank"] == rank][-1]

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool], limit_s: float = 600.0) -> None:
        until_s = time.monotonic() + limit_s
        while not condition(self.notes()):
            assert time.monotonic() < until_s and self.process.poll() in (None, 0), "the run does not go on"
            time.sleep(0.005)

    def wait_for_new(self, event: str, after_s: float) -> float:
        """When the first event of the processes that began after a moment was told."""

        def new(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
            begun = [note["time"] for note in notes if note["event"] == "start" and note["time"] > after_s]
            return [note for note in notes if note["event"] == event and begun and note["time"] >= begun[0]]

        self.wait(lambda notes: bool(new(notes)))
        return new(self.notes())[0]["time"]


def when_ended(pid: int, limit_s: float = 120.0) -> float:
    """When a process of another's is gone, or only its exit code is left."""
    until_s = time.time() + limit_s
    while time.time() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return time.time()
        if state == "Z":
            return time.time()
        time.sleep(0.002)
    raise AssertionError(f"process {pid} still runs {limit_s:.0f} s after the other was killed")


def spread(times: Sequence[float]) -> str:
    """Median, and from the least to the most."""
    return f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


if __name__ == "__main__":
    main()
