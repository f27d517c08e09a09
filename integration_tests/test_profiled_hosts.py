"""A training run in two processes profiles both: on one clock, with the process that delays the other, and its line."""

import gzip
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stack_core.cli import main
from stack_profile.analyses.hosts import hosts
from stack_profile.analyses.transfers import transfers
from stack_profile.traces.trace import load_trace
from stack_profile.traces.xplane import read_space

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
# Runs `stack train`; in process 1, each batch is late.
SCRIPT = """
import sys
import time
from stack_core.cli import main
from stack_train.run.loop import TrainingLoop

class Late:
    def __init__(self, batches):
        self.batches = batches
    def __next__(self):
        time.sleep(0.4)
        return next(self.batches)
    def __getattr__(self, name):
        return getattr(self.batches, name)

if sys.argv[-1] == "1":
    run = TrainingLoop.run
    TrainingLoop.run = lambda self, state, batches, *rest: run(self, state, Late(batches), *rest)
main(sys.argv[1:])
"""
SLEEP = SCRIPT.splitlines().index("        time.sleep(0.4)") + 1
FIRST, STEPS = 5, 8


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The directory of the capture of a run of two processes."""
    folder = tmp_path_factory.mktemp("hosts")
    choose = random.Random(0).choices
    for number in range(20):
        words = choose(("alpha", "beta", "return", "yield", "(x)", "\n"), k=2000)
        (folder / f"{number}.txt").write_text(" ".join(words))
    (folder / "late.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "output": folder / "run",
        "data.source": f"text:{folder}/*.txt",
        "data.batch_size": 4,
        "data.vocab_size": 280,
        "model.vocab_size": 280,
        "run.steps": FIRST + STEPS + 1,
        "run.evaluate_every_steps": 0,
        "checkpoint.every_steps": 0,
        "profile.first_step": FIRST,
        "profile.steps": STEPS,
        "processes.count": 2,
        "processes.coordinator": coordinator,
    }
    options = [each for key, value in settings.items() for each in (f"--{key}", str(value))]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, str(folder / "late.py"), "train", str(QUICKSTART), *options, "--processes.id"]
    running = [
        subprocess.Popen([*command, rank], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in "01"
    ]
    said = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return folder / "run" / "profile"


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def shifted(captured, folder, ahead_ns):
    """A copy of the capture in which the clock of process 1 is ahead."""
    shutil.copytree(captured, folder)
    (trace,) = folder.rglob("*_1.xplane.pb")
    origins = [plane.stats.get("profile_start_time") for plane in read_space(trace).planes]
    (origin_ns,) = filter(None, origins)
    data = trace.read_bytes()
    assert data.count(varint(origin_ns)) == 1
    trace.write_bytes(data.replace(varint(origin_ns), varint(origin_ns + ahead_ns)))
    (stacks,) = folder.rglob("*_1.stacks.json.gz")
    content = json.loads(gzip.decompress(stacks.read_bytes()))
    content["times_ns"][0] += ahead_ns
    pauses = np.array(content["pauses"]).reshape(-1, 5)
    pauses[:, :2] += ahead_ns
    content["pauses"] = pauses.reshape(-1).tolist()
    stacks.write_bytes(gzip.compress(json.dumps(content).encode()))
    return folder


@pytest.mark.slow  # trains in two processes
@pytest.mark.parametrize("ahead_s", [0.0, 0.25, -0.25])
def test_the_shift_of_a_clock_is_recovered_and_the_slow_process_named(captured, tmp_path, ahead_s, capsys):
    folder = shifted(captured, tmp_path / "shifted", round(ahead_s * 1e9))
    trace = load_trace(folder)
    clock = trace.clocks[1]
    assert abs(clock.offset_s - ahead_s) <= clock.error_s < 0.01
    assert clock.is_moved == (ahead_s != 0)
    late, other = hosts(trace).rows
    assert (late.name, other.name) == (clock.name, trace.clocks[0].name)
    assert late.delay_s > 10 * other.delay_s and late.delay_s > 0.2 * STEPS
    assert (late.cause, Path(late.line).name) == ("input", f"late.py:{SLEEP}")
    assert late.excess_s > 0.2 * (STEPS - 1)
    # The steps of both have the same numbers, those of the run.
    steps = [{step.number: step for step in trace.steps[ops.device]} for ops in trace.devices]
    assert set(range(FIRST, FIRST + STEPS - 1)) <= steps[0].keys() & steps[1].keys()
    for row in transfers(trace).rows:
        assert row.sent_bytes > 0 and row.time_s > 0 and row.stall_s > 0
    main(["profile", "hosts", str(folder), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["straggler"] == late.name and printed["rows"][0]["delay_s"] == late.delay_s
