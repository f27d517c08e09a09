"""Runs that are stopped from outside: by SIGTERM, by Ctrl-C, and by kill -9 at any moment."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

CONFIG = """
model: {family: llama, vocab_size: 280, layers: 2, embed: 32, heads: 2, mlp: 48, max_positions: 32, dtype: float32}
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
        stack = [sys.executable, "-m", "stack_core.cli", "train", str(tmp_path / "run.yaml")]
        return [*stack, f"--data.source=text:{tmp_path}/*.txt", f"--output={output}", f"--run.steps={steps}", *more]

    return build


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


def test_a_stopped_run_saves_and_can_be_resumed(command, tmp_path):
    """Stopped by Ctrl-C, resumed, stopped by SIGTERM, resumed."""
    directory, more, stopped_at = tmp_path / "run", [], 0
    for number, status in (signal.SIGINT, 2), (signal.SIGTERM, 0):
        before = steps_done(directory)
        process = subprocess.Popen(command(directory, 10**6, *more), stderr=subprocess.PIPE, text=True)
        wait_for(process, lambda before=before: steps_done(directory) >= before + 7)
        process.send_signal(number)
        _, messages = process.communicate(timeout=120)
        assert process.returncode == status, messages
        assert "Traceback" not in messages
        assert ("Go on with --resume" in messages) is (status == 2)
        before, stopped_at = stopped_at, int(newest_manifest(directory)[0])
        assert stopped_at >= before + 7
        more = ["--resume"]
    resumed = command(directory, stopped_at + 3, "--resume", "--json")
    summary = json.loads(subprocess.run(resumed, check=True, stdout=subprocess.PIPE).stdout)
    assert summary["step"] == stopped_at + 3


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
