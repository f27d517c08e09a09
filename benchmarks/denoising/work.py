"""What both libraries compute: three small denoisers in float32 with random weights, and how a round is asked for.

Usage of a worker: python NAME_worker.py MODEL TASK FOLDER, then a line on standard input for each round. diffusers
writes its model and its scheduler into the folder, and both workers write the samples from the same noise.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROWS, STEPS, GUIDANCE, CHANNELS = 2, 6, 4.0, 4
CLASSES, TEXT_TOKENS, TEXT_DIM = 1000, 77, 256
WARM_UP, REPETITIONS = 2, 3
LEARNING_RATE = 1e-4
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SHIFT = 3.0  # of the times of videos
SHAPES: Mapping[str, tuple[int, ...]] = {"unet": (32, 32), "dit": (32, 32), "wan": (5, 16, 16)}
"""Sides of the latents by model, after the frames of a video."""

TASKS = ("sampling", "step")


def noise(model: str) -> np.ndarray:
    """Returns noise for `ROWS` images, [rows, *frames, height, width, channels]."""
    return np.random.default_rng(0).normal(size=(ROWS, *SHAPES[model], CHANNELS)).astype(np.float32)


def conditions(model: str) -> dict[str, np.ndarray]:
    """Returns the labels or texts of `ROWS` images, and their negative counterparts."""
    rng = np.random.default_rng(1)
    if model == "dit":
        labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
        return {"labels": labels, "negative_labels": np.full_like(labels, CLASSES)}
    names = ("text", "negative_text")
    return {name: rng.normal(size=(ROWS, TEXT_TOKENS, TEXT_DIM)).astype(np.float32) for name in names}


def serve(work: Callable[[], Any], sample: np.ndarray | None, folder: Path, name: str) -> None:
    """Warms up, writes a sample, and then does the work for each line, whose answer is times and memory."""
    if sample is not None:
        np.save(folder / f"{name}.npy", sample)
    for _ in range(WARM_UP):
        work()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of memory
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        times = [_timed(work) for _ in range(REPETITIONS)]
        cpu_s, wall_s = (sorted(each)[REPETITIONS // 2] for each in zip(*times, strict=True))
        print(json.dumps({"cpu_s": cpu_s, "s": wall_s, "peak_bytes": _peak_bytes()}), flush=True)


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
