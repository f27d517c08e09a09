"""Post-training beside Tunix and TRL: sampling, a supervised step and a GRPO step of the same Llama in float32.

    nox -s bench -- rl_vs_peers

Each contender runs in its own process, the peers in their own environments; they take turns, task by task and
round by round. Times are medians over the steps of a round, after a warm-up, of CPU and of the wall clock; a shared
machine changes the first less. Writes `results/rl_vs_peers.md` and `.json` after every round.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.libraries import Worker, install, versions_of
from report import RESULTS, beside, circumstances, spread, table, write

TASKS = {
    "sft": "supervised step, 8 x 128 tokens",
    "sampling": "sampling, 8 x 32 tokens",
    "sampling_64": "sampling, 64 x 32 tokens",
    "grpo": "GRPO step, 4 x 4",
}
CLOCKS = {"cpu_s": "CPU", "s": "wall"}  # as workers tell them
WORKERS = Path(__file__).parent / "post_training"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A library, the program that measures it, and the environment for this program.

    Attributes:
      name: name of its program in `post_training`, without "_worker.py".
      requirements: packages to install; () for the environment of this process.
      packages: distributions whose versions are recorded.
      python: version of the interpreter; None for that of this process.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    python: str | None = None

    def install(self, environments: Path) -> Path:
        """Returns the interpreter of the contender's environment, which is made on first use."""
        if not self.requirements:
            return Path(sys.executable)
        folder = environments.resolve() / f"post-training-{self.name}"
        return install(folder, self.requirements, self.python)


CONTENDERS = (
    Contender(name="stack", title="stack", packages=("stack-train", "stack-rl", "jax")),
    Contender(
        name="tunix",
        title="Tunix",
        packages=("google-tunix", "jax", "flax"),
        requirements=("google-tunix==0.1.7",),
    ),
    Contender(
        name="trl",
        title="TRL",
        packages=("trl", "transformers", "torch"),
        requirements=("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),
        python="3.11",
    ),
)
PEERS = CONTENDERS[1:]


def ask(worker: Worker, task: str) -> dict[str, float]:
    """Returns the medians over the task's steps."""
    return dict(zip(CLOCKS, map(statistics.median, zip(*worker.ask(task), strict=True)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where the peers are installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    pythons = {each.name: each.install(arguments.environments) for each in CONTENDERS}
    versions = {each.title: versions_of(pythons[each.name], each.packages) for each in CONTENDERS}
    found: dict[str, dict[str, list[dict[str, float]]]] = {task: {name: [] for name in pythons} for task in TASKS}
    for _ in range(arguments.rounds):
        workers = {name: Worker(python, WORKERS / f"{name}_worker.py") for name, python in pythons.items()}
        try:
            for task, rounds in found.items():
                for name, worker in workers.items():
                    rounds[name].append(ask(worker, task))
        finally:
            for worker in workers.values():
                worker.close()
        tasks = {
            task: {name: beside(rounds["stack"], rounds[name]) for name in rounds} for task, rounds in found.items()
        }
        record = {**circumstances(), "versions": versions, "tasks": tasks}
        write(arguments.results, "rl_vs_peers", record, report(record))


def report(record: Mapping[str, Any]) -> str:
    machine, tasks = record["machine"], record["tasks"]
    rows = []
    for task, title in TASKS.items():
        for key, clock in CLOCKS.items():
            times = [spread([1e3 * number for number in tasks[task][each.name][key]]) for each in CONTENDERS]
            ratios = [spread(tasks[task][each.name]["stack over it"][key]) for each in PEERS]
            rows.append([f"{title}, {clock}", *times, *ratios])
    heading = ["", *(f"{each.title}, ms" for each in CONTENDERS), *(f"stack over {each.title}" for each in PEERS)]
    rounds = tasks["sft"]["stack"]["rounds"]
    versions = "; ".join(
        f"{title}: " + ", ".join(f"{package} {version}" for package, version in each.items())
        for title, each in record["versions"].items()
    )
    lines = [
        "# Post-training beside its peers",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB. "
        f"Llama, 1M parameters, float32. {versions}.",
        "",
        *table(heading, rows),
        "",
        f"Median (least to most) over {rounds} {'round' if rounds == 1 else 'rounds'}; a round's figure is the median "
        "over its steps. Ratios are formed within a round. CPU is the time of all threads of the process.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
