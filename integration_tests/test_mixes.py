"""Runs on several environments whose weights follow the measured success."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_train import RunConfig, build, start
from stack_train.run.train import train

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = (
    *("model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16", "data.groups=6", "data.group_size=4"),
    *("run.steps=6", "checkpoint.every_steps=3", "checkpoint.keep=10", "run.evaluate_every_steps=0"),
)
LEVELS = [{"name": "cell", "cells": cells, "held_out": 4} for cells in (2, 6, 10)]


def levels(output: Path) -> RunConfig:
    mapping = load_yaml(EXAMPLES / "cell.yaml")
    curriculum = {"rate": 0.5, "floor": 0.02}
    mapping["data"]["environment"] = {"name": "mix", "environments": LEVELS, "curriculum": curriculum}
    return parse(RunConfig, apply_overrides(mapping, [*TINY, f"output={output}"]))


def steps(output: Path) -> list[list[float]]:
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    names = ("step", "loss", "reward", "grad_norm", "logprob", "flat_groups")
    return sorted([each[name] for name in names] for each in found if each["kind"] == "train")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted, with the tasks of each batch and the running success after it."""
    run = build(levels(tmp_path_factory.mktemp("runs") / "whole"))
    played, play = [], run.data._next_update

    def next_update():
        batch = play()
        played.append((tuple(each.task for each in run.data._current.trajectories), dict(run.data._ledger.memory)))
        return batch

    run.data._next_update = next_update
    return start(run).directory, played


def test_the_success_is_measured_and_changes_the_shares(whole):
    _, played = whole
    counts = [np.bincount(np.array(tasks) % 3, minlength=3) // 4 for tasks, _ in played]
    assert max(abs(counts[0] - 2)) <= 1, "nearly equal shares before the first result"
    assert len({tuple(memory["success"].values()) for _, memory in played}) == 6
    assert any(max(abs(each - 2)) > 1 for each in counts[1:])


def test_a_run_that_resumes_chooses_the_same_tasks_and_ends_bitwise_like_a_whole_one(whole, tmp_path):
    directory, _ = whole
    cut = tmp_path / "cut"
    shutil.copytree(directory, cut)
    shutil.rmtree(cut / "checkpoints" / "00000006")
    for each in cut.glob("rollouts.journal*"):  # without it, the tasks are chosen and sampled again
        each.unlink()
    kept = [line for line in (cut / "metrics.jsonl").read_text().splitlines() if json.loads(line).get("step", 0) <= 3]
    (cut / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    train(levels(cut), resume=True)
    assert steps(cut) == steps(directory)
