"""Diffusion beside diffusers: sampling with guidance and a training step of a small UNet, DiT and Wan in float32.

    nox -s bench -- diffusion_vs_peers

Each library runs in its own process, diffusers in its own environment. They have the same weights, and their samples
from the same noise must agree before anything is measured. They take turns, round by round; ratios are formed within a
round. CPU time is the sum over all threads, which a shared machine changes less than wall time. Memory is the peak of
resident memory while a process computes, after compilation. Writes `results/diffusion_vs_peers.md` and `.json` after
every task.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from denoising.work import ROWS, SHAPES, STEPS, TASKS
from peers.libraries import Worker, install, versions_of
from report import RESULTS, beside, circumstances, spread, table, write

WORKERS = Path(__file__).parent / "denoising"
LIBRARIES = ("diffusers", "stack")  # diffusers writes the weights
REQUIREMENTS = ("torch==2.13.0", "diffusers==0.42.1", "transformers==5.23.0")
PACKAGES = {"stack": ("stack-train", "stack-kernels", "jax"), "diffusers": ("diffusers", "torch")}
FIGURES = {"s": ("wall, ms", 1e3), "cpu_s": ("CPU, ms", 1e3), "peak_bytes": ("memory, MB", 1e-6)}
TITLES = {"sampling": f"{STEPS} steps of sampling, {ROWS} x 2 rows", "step": f"training step, {ROWS} rows"}
TOLERANCE = 1e-3
PYTHON = "3.11"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where diffusers is installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    diffusers = install(arguments.environments.resolve() / "diffusion-diffusers", REQUIREMENTS, PYTHON)
    pythons = {"stack": Path(sys.executable), "diffusers": diffusers}
    versions = {name: versions_of(pythons[name], packages) for name, packages in PACKAGES.items()}
    tasks: dict[str, Any] = {}
    for model in arguments.models:
        for task in TASKS:
            runs = measured(model, task, pythons, arguments.rounds)
            tasks[f"{model}, {TITLES[task]}"] = {name: beside(runs["stack"], runs[name]) for name in LIBRARIES}
            record = {**circumstances(), "versions": versions, "load_average": os.getloadavg()[0], "tasks": tasks}
            write(arguments.results, "diffusion_vs_peers", record, report(record))


def measured(model: str, task: str, pythons: Mapping[str, Path], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns the figures of each round by library.

    Raises:
      RuntimeError: the samples of the libraries differ.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LIBRARIES}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in LIBRARIES:
                print(f"starting {name}, {model}, {task}", file=sys.stderr, flush=True)
                workers[name] = Worker(pythons[name], WORKERS / f"{name}_worker.py", (model, task, folder))
            if task == "sampling":
                theirs, ours = (np.load(Path(folder, f"{name}.npy")) for name in LIBRARIES)
                difference = np.abs(theirs - ours).max() / np.abs(theirs).max()
                if not difference <= TOLERANCE:
                    raise RuntimeError(f"The samples of {model} differ by {difference:.2g} of the largest value.")
            for number in range(rounds):
                for name in LIBRARIES if number % 2 else reversed(LIBRARIES):
                    runs[name].append(workers[name].ask())
        finally:
            for worker in workers.values():
                worker.close()
    return runs


def report(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    rows = []
    for title, task in record["tasks"].items():
        for key, (unit, scale) in FIGURES.items():
            figures = [spread([scale * number for number in task[name][key]]) for name in LIBRARIES]
            rows.append([f"{title}, {unit}", *figures, spread(task["diffusers"]["stack over it"][key])])
    rounds = next(iter(record["tasks"].values()))["stack"]["rounds"]
    versions = "; ".join(
        f"{title}: " + ", ".join(f"{package} {version}" for package, version in each.items())
        for title, each in record["versions"].items()
    )
    lines = [
        "# Diffusion beside diffusers",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB, load "
        f"{record['load_average']:.1f}. float32. {versions}.",
        "",
        *table(["", *LIBRARIES, "stack over diffusers"], rows),
        "",
        f"Median (least to most) over {rounds} {'round' if rounds == 1 else 'rounds'}; a round's figure is the median "
        "over its repetitions. Ratios are formed within a round. CPU is the time of all threads of the process.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
