"""Post-training beside Tunix: sampling at batch 8, a supervised step and a GRPO step of the same Llama in float32.

    nox -s bench -- rl_vs_tunix

Each contender runs in its own process, Tunix in its own environment; they take turns, task by task and
round by round. Times are medians over the steps of a round, after a warm-up, of CPU and of the wall clock; a shared
machine changes the first less. Writes `results/rl_vs_tunix.md` and `.json` after every round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report import RESULTS, beside, circumstances, spread, table, write

TUNIX = "google-tunix==0.1.7"
TASKS = {"sft": "supervised step, 8 x 128 tokens", "sampling": "sampling, 8 x 32 tokens", "grpo": "GRPO step, 4 x 4"}
CLOCKS = {"cpu_s": "CPU", "s": "wall"}  # as workers tell them
WORKERS = Path(__file__).parent / "post_training"


class Worker:
    """A contender that waits for the name of a task."""

    def __init__(self, python: Path, name: str) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TQDM_DISABLE": "1"}
        command = [str(python), str(WORKERS / f"{name}_worker.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def ask(self, task: str) -> dict[str, float]:
        """The medians over the task's steps."""
        print(task, file=self._process.stdin, flush=True)
        return dict(zip(CLOCKS, map(statistics.median, zip(*self._answer(), strict=True)), strict=True))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        """The next line that is JSON; libraries print others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('"', "[[")):
                return json.loads(line)
        raise RuntimeError(f"A contender ended with status {self._process.wait()}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "stack" / "bench-tunix")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    pythons = {"stack": Path(sys.executable), "tunix": installed(arguments.environment)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {task: {name: [] for name in pythons} for task in TASKS}
    for _ in range(arguments.rounds):
        workers = {name: Worker(python, name) for name, python in pythons.items()}
        try:
            for task, rounds in found.items():
                for name, worker in workers.items():
                    rounds[name].append(worker.ask(task))
        finally:
            for worker in workers.values():
                worker.close()
        tasks = {
            task: {name: beside(rounds["stack"], rounds[name]) for name in rounds} for task, rounds in found.items()
        }
        write(arguments.results, "rl_vs_tunix", {**circumstances(), "tunix": TUNIX, "tasks": tasks}, report(tasks))


def installed(environment: Path) -> Path:
    """The interpreter of an environment with Tunix, made unless it is there."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", TUNIX], check=True)
    return python


def report(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = []
    for task, title in TASKS.items():
        ours, theirs = tasks[task]["stack"], tasks[task]["tunix"]
        for key, clock in CLOCKS.items():
            medians = [f"{each[key][2] * 1e3:,.1f}" for each in (ours, theirs)]
            rows.append([f"{title}, {clock}", *medians, spread(theirs["stack over it"][key])])
    heading = ["", "stack, ms", "Tunix, ms", "stack over Tunix"]
    rounds = tasks["sft"]["stack"]["rounds"]
    lines = [f"# Post-training beside {TUNIX}", "", *table(heading, rows), ""]
    lines.append(
        f"Medians over steps and {rounds} rounds; in brackets the rounds' extremes. Llama, 1M parameters, float32."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
