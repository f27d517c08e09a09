"""Episodes of evaluations as JSON records, for the report of a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_rl.contracts import Tasks, Trajectory

__all__ = ["MOST_SAMPLES", "SAMPLES_FILE", "write_samples"]

SAMPLES_FILE = "samples.jsonl"
MOST_SAMPLES = 16
"""Episodes per evaluation that are saved for the report."""


def write_samples(directory: Path | None, tasks: Tasks, found: Sequence[Trajectory | None], step: int) -> None:
    """Appends episodes on held-out tasks to the samples of a run; without a directory, does nothing."""
    if directory is None:
        return
    with (directory / SAMPLES_FILE).open("a", encoding="utf-8") as file:
        for each in found:
            if each is not None:
                file.write(json.dumps(_sample(tasks, each, step)) + "\n")


def _sample(tasks: Tasks, each: Trajectory, step: int) -> dict[str, Any]:
    """Converts an episode to a record for the report, with observations and actions as alternating turns."""
    # A turn ends where the next token has another source, the environment or the policy.
    turns = np.flatnonzero(np.diff(each.sampled)) + 1
    pieces = [tuple(map(int, piece)) for piece in np.split(each.tokens, turns)]
    return {
        "step": step,
        "task": tasks.name(each.task, held_out=True),
        "turns": [tasks.text(piece) for piece in pieces],
        "reward": float(each.rewards.sum()),
        "verdict": each.verdict,
        **({"facts": dict(each.facts)} if each.facts else {}),
    }
