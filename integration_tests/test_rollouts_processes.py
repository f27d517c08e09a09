"""One run on rollouts in two processes, each of which plays its share of the groups."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from stack_core.abi.config import to_mapping
from stack_train.checkpoint import CheckpointStore
from stack_train.checkpoint.directory import CheckpointDirectory
from stack_train.run.program import build_program
from stack_train.run.train import train

from .test_rollouts import cell, records

SMALL = ("run.steps=3", "run.evaluate_every_steps=0", "data.groups=3", "checkpoint.every_steps=0")


def written(output: Path, *overrides: str) -> Path:
    """The config of a run as a file."""
    settings = output.with_suffix(".yaml")
    settings.write_text(yaml.safe_dump(to_mapping(cell(output, *overrides))))
    return settings


def started(settings: Path, *arguments: str) -> list[subprocess.Popen]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        together = ["--processes.count", "2", "--processes.coordinator", f"127.0.0.1:{free.getsockname()[1]}"]
    command = [sys.executable, "-m", "stack_core", "train", str(settings), *together, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return [
        subprocess.Popen(
            [*command, "--processes.id", each], env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE
        )
        for each in "01"
    ]


def ended(processes: list[subprocess.Popen]) -> list[int]:
    """The statuses of processes, which print what they say."""
    for process in processes:
        sys.stdout.write(process.communicate(timeout=1200)[0].decode())
    return [process.returncode for process in processes]


def parameters(output: Path, like: Path, step: int) -> list[np.ndarray]:
    program = build_program(cell(like, *SMALL))
    with CheckpointStore(output / "checkpoints") as store:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(store.restore(program.abstract_state, step).state.params)]


@pytest.mark.slow  # two processes; packages/rl/tests/test_share.py has two threads
def test_two_processes_play_and_learn_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    processes = started(written(two, *SMALL))
    train(cell(one, *SMALL))
    assert ended(processes) == [0, 0]
    for kind in ("train", "evaluation"):
        ours, theirs = records(two, kind), records(one, kind)
        assert [each["step"] for each in ours] == [each["step"] for each in theirs] and ours
        for name in ("loss", "reward", "logprob", "flat_groups", "grad_norm"):
            found, expected = ([each.get(name, 0.0) for each in several] for several in (ours, theirs))
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=name)
    # AdamW divides by the size of the gradient, so an entry whose gradient is close to 0 moves by a part of the rate,
    # 2e-3, that depends on rounding.
    for ours, theirs in zip(parameters(two, one, 3), parameters(one, one, 3), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    # Groups 0 to 8, each in the journal of one process.
    assert {each.name for each in two.glob("rollouts*.journal")} == {"rollouts.journal", "rollouts-1.journal"}
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()


@pytest.mark.slow  # two processes, three times
@pytest.mark.parametrize(("engine", "victim"), [("static", 1), ("llm", 0)])
def test_two_trainers_of_which_one_is_killed_in_the_middle_end_bitwise_like_a_whole_run(tmp_path, engine, victim):
    longer = ("run.steps=12", "checkpoint.every_steps=2", "data.groups=4", f"data.engine={engine}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert ended(started(written(whole, *SMALL, *longer))) == [0, 0]
    processes = started(settings := written(cut, *SMALL, *longer))
    metrics = cut / "metrics.jsonl"
    while not metrics.exists() or not any(each["step"] >= 5 for each in records(cut, "train")):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[victim].kill()
    processes[victim].wait()
    processes[1 - victim].kill()  # what a cluster does with a process that waits for another
    ended(processes)
    assert processes[victim].returncode == -signal.SIGKILL and CheckpointDirectory(cut / "checkpoints").steps()[-1] < 12
    assert ended(started(settings, "--resume")) == [0, 0]
    for ours, theirs in zip(parameters(cut, whole, 12), parameters(whole, whole, 12), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found, expected = ({each["step"]: each for each in records(run, "train")} for run in (cut, whole))
    for name in ("loss", "reward", "grad_norm", "staleness"):
        assert [found[step][name] for step in sorted(found)] == [expected[step][name] for step in sorted(expected)]
