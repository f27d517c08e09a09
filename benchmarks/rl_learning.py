"""Learning curves of the examples of reinforcement learning, a run for each seed, drawn for docs/rl.md.

    python benchmarks/rl_learning.py cell_grpo --seeds 0 1 2

Runs that are finished under --runs are drawn as they are.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CELL, ADD = "examples/cell.yaml", "examples/add.yaml"
PPO = ("--objective.name", "ppo", "--data.advantage", "gae", "--data.weights", "token")
DAPO = ("--objective.name", "dapo", "--data.weights", "token")
RECIPES: Mapping[str, Sequence[str]] = {
    "cell_grpo": (CELL,),
    "cell_dapo": (CELL, *DAPO),
    "cell_ppo": (CELL, *PPO, "--optimizer.learning_rate", "1e-3", "--run.steps", "500"),
    "add_grpo": (ADD,),
    "add_distill": ("examples/add_distill.yaml",),
    "letters_ppo": ("examples/letters_ppo.yaml",),
}
METRICS = {"letters_ppo": "worth"}  # a fact of the samples shown; elsewhere the share of right answers is drawn
WIDTH, HEIGHT, LEFT, BOTTOM = 480, 240, 48, 28
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--figure", type=Path, help="by default docs/figures/RECIPE.svg")
    arguments = parser.parse_args()
    metric = METRICS.get(arguments.recipe, "correct")
    curves = {}
    for seed in arguments.seeds:
        output = arguments.runs / f"{arguments.recipe}-{seed}"
        trained(arguments.recipe, seed, output)
        curves[f"seed {seed}"] = curve = evaluations(output, metric)
        print(f"{arguments.recipe} seed {seed}: " + ", ".join(f"{step}: {value:.3f}" for step, value in curve))
    figure = arguments.figure or ROOT / "docs" / "figures" / f"{arguments.recipe}.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    figure.write_text(drawn(arguments.recipe, metric, curves))


def trained(recipe: str, seed: int, output: Path) -> None:
    """Trains a run to its end, unless it got there before."""
    if (output / "report.html").is_file():
        return
    before = cpu_s()
    command = [sys.executable, "-m", "stack_core.cli", "train", *RECIPES[recipe]]
    resume = ["--resume"] if output.exists() else []
    rewards = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}  # where examples keep theirs
    chosen = ["--run.seed", str(seed), "--output", str(output.absolute())]
    subprocess.run([*command, *chosen, *resume], check=True, cwd=ROOT, env=rewards)
    print(f"{output}: {cpu_s() - before:.0f} CPU-s")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def evaluations(output: Path, metric: str) -> list[tuple[int, float]]:
    """The steps of a run's evaluations and what they found; for a metric of samples, the mean of those shown."""
    if metric not in METRICS.values():
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [(each["step"], each[metric]) for each in records if each["kind"] == "evaluation"]
    found: dict[int, list[float]] = {}
    for line in (output / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["step"], []).append(sample["facts"][metric])
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


def drawn(title: str, metric: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The curves as SVG."""
    last = max(step for curve in curves.values() for step, _ in curve)
    top = max(1.0, *(value for curve in curves.values() for _, value in curve))

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 12) * step / last
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 24) * value / top:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="14">{title}: {metric} of held-out tasks, played greedily, by step</text>',
    ]
    for part in (0.0, 0.5, 1.0):
        x, y = place(0, part * top).split(",")
        lines.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - 12}" y2="{y}" stroke="#ccc"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.0f}" text-anchor="end">{part * top:g}</text>')
        x, _ = place(part * last, 0).split(",")
        lines.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{part * last:g}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour, points = COLOURS[number % len(COLOURS)], " ".join(place(*point) for point in curve)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{WIDTH - 70}" y="{HEIGHT - BOTTOM - 40 + 14 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
