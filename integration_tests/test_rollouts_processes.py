"""One run on rollouts in two processes, each of which plays its share of the groups."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from stack_core.abi.config import to_mapping
from stack_train.checkpoint import CheckpointStore
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
