"""Runs that are stopped from outside: by SIGTERM, by Ctrl-C, and by kill -9 at any moment."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

CONFIG = """
model: {name: llama, vocab_size: 280, layers: 2, embed: 32, heads: 2, mlp: 48, max_positions: 32, dtype: float32}
data: {seq_tokens: 32, batch_size: 4, validation_fraction: 0.1}
optimizer: {name: adamw, learning_rate: 0.01}
checkpoint: {every_steps: 5, keep: 2}
"""
WORDS = ("alpha", "beta", "gamma", "delta", "return", "yield", "(x)", "\n")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Writes a corpus and a config, and returns the command line that trains on it into a directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    choose = random.Random(0).choices
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(" ".join(choose(WORDS, k=400)))
    (tmp_path / "run.yaml").write_text(CONFIG)

    def build(output, steps, *more):
        stack = [sys.executable, "-m", "stack_core", "train", str(tmp_path / "run.yaml")]
        return [*stack, f"--data.source=text:{tmp_path}/*.txt", f"--output={output}", f"--run.steps={steps}", *more]

    return build


INTERRUPTED = """
import os, signal, sys, threading
phase = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored

def interrupt(delay_s):
    threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGINT]).start()

def during(owner, name, delay_s=0.0, *, when=lambda: True):
    wrapped = getattr(owner, name)
    def call(*args, **options):
        if when():
            interrupt(delay_s)
        return wrapped(*args, **options)
    setattr(owner, name, call)

if phase == "import":
    interrupt(0.3)
else:
    from jax._src import compiler
    from stack_core.abi.event_bus import EventBus
    from stack_train.checkpoint import CheckpointStore
    from stack_train.data.kinds.text import TextData
    from stack_train.run import train
    from stack_train.run.loop import TrainingLoop
    match phase:
        case "data":
            during(TextData, "build")
        case "compilation":  # in a thread of XLA, which goes on when the main thread leaves
            within = lambda: any(frame.f_code.co_name == "compile_fitting" for frame in frames())
            frames = lambda: [each for each in walk(sys._current_frames()[threading.main_thread().ident])]
            def walk(frame):
                while frame:
                    yield frame
                    frame = frame.f_back
            during(compiler, "backend_compile_and_load", 0.1, when=within)
        case "first step":
            during(TrainingLoop, "_dispatch")
        case "save":
            during(CheckpointStore, "save")
        case "evaluation":
            during(TrainingLoop, "evaluate")
        case "shutdown":
            during(EventBus, "close")
from stack_core.entry import main
main()
"""


def steps_done(directory):
    metrics = directory / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(process, condition, timeout_s=300):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def newest_manifest(directory):
    newest = max(path for path in (directory / "checkpoints").iterdir() if path.name.isdigit())
    return newest.name, json.loads((newest / "manifest.json").read_text())["content"]


@pytest.mark.parametrize(
    ("phase", "status", "part"),
    [
        pytest.param("import", 130, "Interrupted.", marks=pytest.mark.slow),
        pytest.param("data", 130, "Interrupted.", marks=pytest.mark.slow),
        ("compilation", 130, "Interrupted."),
        pytest.param("first step", 2, "Stopped by Ctrl-C after step 1 of 4; it is saved", marks=pytest.mark.slow),
        pytest.param("save", 2, "Stopped by Ctrl-C after step 2 of 4; it is saved", marks=pytest.mark.slow),
        pytest.param("evaluation", 2, "Stopped by Ctrl-C after step 1 of 4; it is saved", marks=pytest.mark.slow),
        pytest.param("shutdown", 0, "finished at step 4", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_any_phase_ends_without_a_traceback_or_a_crash(command, tmp_path, phase, status, part):
    _, _, _, *arguments = command(tmp_path / "run", 4, "--checkpoint.every_steps=2", "--run.evaluate_every_steps=1")
    ran = [sys.executable, "-c", INTERRUPTED, phase, *arguments]
    ended = subprocess.run(ran, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status and part in ended.stderr, ended
    assert "Traceback" not in ended.stderr and "Fatal" not in ended.stderr, ended.stderr
    assert (tmp_path / "run" / "config.yaml").exists() == (status != 130)
    if status == 2:  # a cut evaluation is made up for
        resumed = command(tmp_path / "run", 4, "--checkpoint.every_steps=2", "--run.evaluate_every_steps=1", "--resume")
        done = subprocess.run(resumed, capture_output=True, text=True, timeout=300, check=True)
        assert "finished at step 4" in done.stderr
        records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [record["step"] for record in records if record["kind"] == "evaluation"] == [1, 2, 3, 4]


def test_a_stopped_run_saves_and_can_be_resumed(command, tmp_path):
    """Stopped by Ctrl-C, resumed, stopped by SIGTERM."""
    directory, more, stopped_at = tmp_path / "run", [], 0
    for number, status in (signal.SIGINT, 2), (signal.SIGTERM, 0):
        before = steps_done(directory)
        process = subprocess.Popen(command(directory, 10**6, *more), stderr=subprocess.PIPE, text=True)
        wait_for(process, lambda before=before: steps_done(directory) >= before + 3)
        process.send_signal(number)
        _, messages = process.communicate(timeout=120)
        assert process.returncode == status, messages
        assert "Traceback" not in messages
        assert ("Add --resume to continue" in messages) is (status == 2)
        before, stopped_at = stopped_at, int(newest_manifest(directory)[0])
        assert stopped_at >= before + 3
        more = ["--resume"]


@pytest.mark.slow
def test_twenty_kills_end_in_the_parameters_of_an_uninterrupted_run(command, tmp_path):
    steps, kills = 400, 20
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, steps), check=True)
    moments = random.Random(1)
    more = []
    for kill in range(kills):
        goal = (kill + 1) * (steps - 60) // kills
        process = subprocess.Popen(command(killed, steps, *more))
        # After its metrics have grown a process trains and saves by turns; before that it starts up and restores.
        if kill % 5:
            wait_for(process, lambda goal=goal: last_step(killed) >= goal)
        time.sleep(moments.uniform(0, 0.3 if kill % 5 else 8))
        process.kill()
        process.wait()
        more = ["--resume"] if (killed / "config.yaml").exists() else []
    subprocess.run(command(killed, steps, "--resume"), check=True)
    assert newest_manifest(killed)[0] == newest_manifest(whole)[0]
    assert newest_manifest(killed)[1]["leaves"] == newest_manifest(whole)[1]["leaves"]
    assert losses(killed) == losses(whole)


def last_step(directory):
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def losses(directory):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
