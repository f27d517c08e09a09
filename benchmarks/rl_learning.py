"""Learning curves of the examples of reinforcement learning, a run for each seed, drawn for docs/rl.md.

    python benchmarks/rl_learning.py cell_grpo --seeds 0 1 2

Runs that are finished under --runs are drawn as they are. Recipes of addition start, for each seed, from a supervised
run that is trained until it answers 35% of the held-out sums; the teacher of `add_distill` is one more.
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
CELL, ADD, SORTING = "examples/cell.yaml", "examples/add.yaml", "examples/sorting.yaml"
# Whitened advantages are as large when nothing is left to learn: at a constant rate they drive the policy off again.
DECAYING = ("--optimizer.schedule.decay", "linear", "--optimizer.schedule.final_fraction", "0")
SLOWER = ("--optimizer.learning_rate", "1e-3")


def cell(name: str, steps: int, *settings: str) -> Sequence[str]:
    """The recipe of an algorithm, whose updates of one batch are steps of their own."""
    length = ("--run.steps", str(steps), "--run.evaluate_every_steps", str(50 if steps < 1000 else 100))
    return (CELL, "--objective.name", name, *length, *settings)


def sorting(name: str, steps: int, *settings: str) -> Sequence[str]:
    """The recipe of an algorithm with DAPO's penalty of long answers."""
    length = ("--run.steps", str(steps), "--run.evaluate_every_steps", str(steps // 8))
    return (SORTING, "--objective.name", name, "--objective.overlong.buffer_fraction", "0.2", *length, *settings)


RECIPES: Mapping[str, Sequence[str]] = {
    "cell_grpo": (CELL,),
    "cell_dr_grpo": cell("dr_grpo", 600, "--objective.entropy", "0.02"),
    "cell_rloo": cell("rloo", 500, "--objective.entropy", "0.03"),
    "cell_reinforce_pp": cell("reinforce_pp", 400),
    "cell_dapo": cell("dapo", 2000, *SLOWER, "--objective.refill_rounds", "2"),
    "cell_gspo": cell("gspo", 1200),
    "cell_cispo": cell("cispo", 1200, *SLOWER),
    "cell_ppo": cell("ppo", 1200, *SLOWER, *DECAYING),
    "sorting_grpo": sorting("grpo", 400, "--objective.entropy", "0.15"),
    "sorting_dr_grpo": sorting("dr_grpo", 600, "--objective.entropy", "0.05"),
    "sorting_rloo": sorting("rloo", 600, "--objective.entropy", "0.03"),
    "sorting_reinforce_pp": sorting("reinforce_pp", 400),
    "sorting_dapo": sorting(
        "dapo",
        800,
        *DECAYING,
        *("--objective.minibatches", "2", "--objective.refill_rounds", "1", "--objective.entropy", "0.2"),
    ),
    "sorting_gspo": sorting("gspo", 1200, *DECAYING),
    "sorting_cispo": sorting(
        "cispo",
        1600,
        *("--optimizer.learning_rate", "5e-4", *DECAYING),
        *("--objective.minibatches", "4", "--objective.entropy", "0.15"),
    ),
    "sorting_ppo": sorting("ppo", 1200, *SLOWER, *DECAYING),
    "add_grpo": (ADD,),
    "add_distill": ("examples/add_distill.yaml",),
    "sums_grpo": ("examples/sums.yaml",),
    "letters_ppo": ("examples/letters_ppo.yaml",),
}
CHAT, TEACHER_STEPS = "examples/add_chat.yaml", 300
FEWEST_STEPS, MORE_STEPS, ENOUGH = 100, 20, 0.35  # of the supervised run that a recipe of addition starts from
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
        points = ", ".join(f"{step}: {value:.3f}" for step, value in curve)
        print(f"| {arguments.recipe} | {seed} | {points} |")  # a row of the table in docs/rl.md
    figure = arguments.figure or ROOT / "docs" / "figures" / f"{arguments.recipe}.svg"
    figure.parent.mkdir(parents=True, exist_ok=True)
    figure.write_text(drawn(arguments.recipe, metric, curves))


def trained(recipe: str, seed: int, output: Path) -> None:
    """Trains a run to its end, unless it got there before."""
    if (output / "report.html").is_file():
        return
    start: list[str] = []
    if recipe.startswith("add_"):
        start = ["--run.init_from", str(able_to_add(seed, output.with_name(f"add_chat-{seed}")))]
    if recipe == "add_distill":
        start += ["--objective.reference", f"run:{teacher(output.with_name('add_teacher'))}"]
    before = cpu_s()
    resume = ["--resume"] if output.exists() else []
    stack("train", *RECIPES[recipe], "--run.seed", str(seed), "--output", str(output.absolute()), *start, *resume)
    print(f"{output}: {cpu_s() - before:.0f} CPU-s")


def able_to_add(seed: int, output: Path) -> Path:
    """A supervised run that answers enough held-out sums; each time it does not, it goes on for a few steps."""
    output, before = output.absolute(), cpu_s()
    if not (ROOT / "runs" / "add-data").exists():
        subprocess.run([sys.executable, ROOT / "examples" / "add.py"], check=True, cwd=ROOT)
    steps, resume = FEWEST_STEPS, []
    while not (output / "enough").exists():
        run = ("--run.seed", str(seed), "--output", str(output), "--run.steps", str(steps), *resume)
        stack("train", CHAT, *run)
        found = json.loads(stack("rl", "evaluate", "examples/add.yaml", str(output), "--json", keep=True))["correct"]
        print(f"{output}: {found:.3f} of the held-out sums after {steps} steps, {cpu_s() - before:.0f} CPU-s")
        steps, resume = steps + MORE_STEPS, ["--resume"]
        if found >= ENOUGH:
            (output / "enough").touch()
    return output


def teacher(output: Path) -> Path:
    output = output.absolute()
    if not (output / "report.html").exists():
        stack("train", CHAT, "--run.steps", str(TEACHER_STEPS), "--run.seed", "100", "--output", str(output))
    return output


def stack(*arguments: str, keep: bool = False) -> str:
    """Runs the command `stack`; what it prints, if that is to be kept."""
    rewards = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}  # where examples keep theirs
    command = [sys.executable, "-m", "stack_core", *arguments]
    output = subprocess.PIPE if keep else None
    return subprocess.run(command, check=True, cwd=ROOT, env=rewards, stdout=output, text=True).stdout or ""


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
