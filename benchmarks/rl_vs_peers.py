"""Post-training beside Tunix and TRL: sampling, a supervised step and a GRPO step of the same Llama in float32.

    nox -s bench -- rl_vs_peers

Each contender runs in its own process, the peers in their own environments; they take turns, task by task and
round by round. Times are medians over the steps of a round, after a warm-up, of CPU and of the wall clock; a shared
machine changes the first less. Writes `results/rl_vs_peers.md` and `.json` after every round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.peer import find_python, run_quietly
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
        """Returns the interpreter of the contender's environment, which is made on first use.

        By pip and not uv: a machine may offer pip a small CPU-only PyTorch through `find-links`.
        """
        if not self.requirements:
            return Path(sys.executable)
        folder = environments.resolve() / f"post-training-{self.name}"
        python, installed = folder / "bin" / "python", folder / "installed"
        if not installed.exists() or installed.read_text() != "\n".join(self.requirements):
            base = sys.executable if self.python is None else find_python(self.python)
            run_quietly(base, "-m", "venv", "--clear", folder)
            run_quietly(python, "-m", "pip", "install", *self.requirements)
            installed.write_text("\n".join(self.requirements))
        return python


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


class Worker:
    """A contender's process, which waits for the name of a task."""

    def __init__(self, python: Path, name: str) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
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
    parser.add_argument("--rounds", type=int, default=5)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where the peers are installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    pythons = {each.name: each.install(arguments.environments) for each in CONTENDERS}
    versions = {each.title: _versions(pythons[each.name], each.packages) for each in CONTENDERS}
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
        record = {**circumstances(), "versions": versions, "tasks": tasks}
        write(arguments.results, "rl_vs_peers", record, report(record))


def _versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, found.stdout.split(), strict=True))


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
