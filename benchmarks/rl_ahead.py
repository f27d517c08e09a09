"""What drawing one step ahead is worth where tools sleep: the game of examples/cell.yaml, whose tool waits.

    nox -s bench -- rl_ahead

How long each episode's tool waits is log-normal, drawn by its task. Runs with `data.max_staleness` 0 and 1 have the
same seeds, tasks and waits, and take turns; the time of a step is the median over steps after a warm-up. Writes
`results/rl_ahead.md` and `.json`.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, circumstances, table, write

from stack_core.abi.config import apply_overrides, config, load_yaml, parse
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Action, Environment, Observation, StepResult, Tasks
from stack_rl.environments.cell import CellConfig
from stack_train import RunConfig, build, start

EXAMPLE = Path(__file__).parents[1] / "examples" / "cell.yaml"
WARM_UP = 5


@config
class SlowCell(CellConfig):
    """The game, whose tool waits `median_s * exp(sigma * normal)` seconds.

    Attributes:
      median_s, sigma: of the log-normal distribution.
    """

    median_s: float = 0.1
    sigma: float = 1.0

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        return _SlowTasks(super().build(policy, seq_tokens=seq_tokens, seed=seed), self, seed)


class _SlowTasks:
    def __init__(self, tasks: Tasks, settings: SlowCell, seed: int) -> None:
        self._tasks, self._settings, self._seed = tasks, settings, seed
        self.training, self.held_out, self.name, self.text = tasks.training, tasks.held_out, tasks.name, tasks.text
        self._attempts: dict[int, itertools.count[int]] = {}

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        attempt = next(self._attempts.setdefault(task, itertools.count()))
        normal = np.random.default_rng([self._seed, task, attempt]).normal()
        wait_s = self._settings.median_s * float(np.exp(self._settings.sigma * normal))
        return _SlowEpisode(self._tasks.episode(task, held_out=held_out), wait_s)


@dataclass
class _SlowEpisode:
    episode: Environment
    wait_s: float

    async def reset(self) -> Observation:
        return await self.episode.reset()

    async def step(self, action: Action) -> StepResult:
        outcome = await self.episode.step(action)
        if outcome.observation is not None:
            await asyncio.sleep(self.wait_s)
        return outcome

    async def close(self) -> None:
        await self.episode.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[int, list[list[float]]] = {0: [], 1: []}
    for seed in options.seeds:
        for staleness, runs in found.items():
            runs.append(step_times(staleness, seed, options.steps))
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(found[0], found[1], strict=True)]
    rows = [
        [f"max_staleness {staleness}", *(f"{statistics.median(each) * 1e3:,.0f}" for each in runs)]
        for staleness, runs in found.items()
    ]
    rows.append(["synchronous over one step ahead", *(f"{ratio:.2f}" for ratio in ratios)])
    heading = ["milliseconds of a step", *(f"seed {seed}" for seed in options.seeds)]
    waits = SlowCell()
    note = (
        f"16 groups of 16 episodes a step; each episode's tool waits {waits.median_s:g} s exp({waits.sigma:g} z), z "
        f"standard normal. Medians over {options.steps - WARM_UP} steps after {WARM_UP}; runs take turns."
    )
    text = "\n".join(["# Drawing one step ahead while tools wait", "", *table(heading, rows), "", note, ""])
    record = {**circumstances(), "median_s": waits.median_s, "sigma": waits.sigma, "seconds": found}
    write(options.results, "rl_ahead", record, text)


def step_times(staleness: int, seed: int, steps: int) -> list[float]:
    """Seconds of each step of a run after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"output={folder}/run", f"run.seed={seed}", f"run.steps={steps}", f"data.max_staleness={staleness}")
        quiet = ("run.evaluate_every_steps=0", "checkpoint.every_steps=0", "data.environment.held_out=0")
        mapping = apply_overrides(load_yaml(EXAMPLE), [*settings, *quiet])
        mapping["data"]["environment"] = SlowCell(held_out=0)
        run, times = build(parse(RunConfig, mapping)), list[float]()
        take: Any = run.data.update_weights  # before the first step, and after each
        run.data.update_weights = lambda *given: times.append(time.perf_counter()) or take(*given)
        start(run)
    return [b - a for a, b in itertools.pairwise(times)][WARM_UP:]


if __name__ == "__main__":
    main()
