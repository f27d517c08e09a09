"""What stack-profile costs a training step of about 50 ms: captures, their end included, and watching for slow steps.

    nox -s bench -- profile_overhead

A block is a number of steps, each waited for. In a round every contender runs one block, in an order that changes:
`off` and `off again` plain, whose difference is what chance makes; `capture` with a trace of its first steps, which is
encoded and written while the others run, and waited for; `no samples` with the same without samples of Python stacks;
`watch` with `stack_profile.Watch` over all. Costs are differences to `off` of the same round, over the time of the
captured steps, or of the steps that a capture is made for; those of samples are differences to `no samples`.
Confidence intervals are of the median, by bootstrap over rounds. Writes `results/profile_overhead.md` and `.json`, and
fails when a cost is surely over its limit.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from report import RESULTS, circumstances, table, write

from stack_profile import AnomalyConfig, Capture, Watch, load_trace

LAYERS, WIDTH = 8, 384
STEP_S = 0.05
CAPTURED_STEPS, OTHER_STEPS = 10, 10
CADENCE_STEPS = 1000  # of a run that captures as many steps once in this many
LIMIT_SHARE = 0.01
ARMING_STEPS = 20  # whose durations a watch must know
RESAMPLES, CONFIDENCE = 10_000, 0.95


@dataclass(frozen=True)
class Block:
    """What one contender took for its steps.

    Attributes:
      captured_s: the first steps alone, without the start and the stop of the capture.
      cpu_s: of all threads.
      stop_s: how long the program was held up by the end of its capture, None without one.
    """

    wall_s: float
    cpu_s: float
    captured_s: float
    stop_s: float | None = None


class Training:
    """A training step over residual blocks, of which the batch is chosen so that it takes the time that is wanted."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 4)
        up = jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * 0.05
        down = jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * 0.05
        self._params: Any = {"blocks": (up, down), "head": jax.random.normal(keys[2], (WIDTH, WIDTH))}
        self._step = jax.jit(_step, donate_argnums=0)
        self.rows = 128
        for _ in range(3):
            self._x = jax.random.normal(keys[3], (self.rows, WIDTH))
            self.run(3)
            self.rows = max(32, round(self.rows * STEP_S / (self.run(5) / 5) / 32) * 32)
        self._x = jax.random.normal(keys[3], (self.rows, WIDTH))
        self.run(3)

    def run(self, steps: int, around: Callable[[], Any] | None = None) -> float:
        """Seconds that so many steps take, each in the context that `around` makes."""
        started_s = time.perf_counter()
        for _ in range(steps):
            if around is None:
                self._once()
            else:
                with around():
                    self._once()
        return time.perf_counter() - started_s

    def _once(self) -> None:
        self._params = jax.block_until_ready(self._step(self._params, self._x))


def _block(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    normed = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x + jnp.tanh(normed @ weights[0]) @ weights[1]


def _loss(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda carry, weights: (jax.checkpoint(_block)(carry, weights), None), x, params["blocks"])
    return jnp.mean((x @ params["head"]) ** 2)


def _step(params: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda leaf, slope: leaf - 1e-4 * slope, params, jax.grad(_loss)(params, x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of some 5 s each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error("--rounds must be at least 5")
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        rounds = _measured(training, Path(folder), arguments.rounds)
        events = _events_per_step(training, Path(folder))
    versions = {package: version(package) for package in ("stack-profile", "jax", "jaxlib")}
    record = {
        **circumstances(),
        "versions": {"python": sys.version.split()[0], **versions},
        "step": {"median_s": _median_step_s(rounds), "rows": training.rows, "events": events},
        "steps": {"captured": CAPTURED_STEPS, "other": OTHER_STEPS, "cadence": CADENCE_STEPS},
        "limit_share": LIMIT_SHARE,
        "costs": _costs(rounds),
        "rounds": [{name: asdict(block) for name, block in blocks.items()} for blocks in rounds],
    }
    write(arguments.results, "profile_overhead", record, _markdown(record))
    if any(cost["limited"] and cost["share"][0] > LIMIT_SHARE for cost in record["costs"]):
        raise SystemExit("surely over the limit")


def _measured(training: Training, folder: Path, rounds: int) -> list[dict[str, Block]]:
    contenders: dict[str, Callable[[], Block]] = {
        "off": lambda: _timed(training),
        "off again": lambda: _timed(training),
        "capture": lambda: _timed(training, Capture(folder / "capture")),
        "no samples": lambda: _timed(training, Capture(folder / "no_samples", stacks_hz=0.0)),
        "watch": lambda: _watched(training, folder / "watch"),
    }
    order = random.Random(0)
    measured = []
    for _ in range(rounds + 1):
        names = order.sample(sorted(contenders), len(contenders))
        measured.append({name: contenders[name]() for name in names})
    return measured[1:]


def _timed(training: Training, capture: Capture | None = None, around: Callable[[], Any] | None = None) -> Block:
    """One block; a capture ends as that of a training run does, without waiting for the device."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    if capture is not None:
        capture.start()
    captured_s = training.run(CAPTURED_STEPS, around)
    if capture is not None:
        capture.stop(settle=False)
    training.run(OTHER_STEPS, around)
    if capture is not None:
        capture.wait()
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return Block(wall_s, cpu_s, captured_s, None if capture is None else capture.stop_s)


def _watched(training: Training, folder: Path) -> Block:
    # A ratio that no step reaches: to keep a trace is not the cost of watching.
    with Watch(folder, AnomalyConfig(warmup_steps=0, ratio=1e6)) as watch:
        for number in range(1, ARMING_STEPS + 1):
            watch.finished(number, STEP_S)
        return _timed(training, around=watch.step)


def _events_per_step(training: Training, folder: Path) -> int:
    with Capture(folder / "events") as capture:
        training.run(CAPTURED_STEPS)
    lines = [line for space in load_trace(capture.wait()).spaces for plane in space.planes for line in plane.lines]
    return round(sum(len(line.events) for line in lines) / CAPTURED_STEPS)


def _costs(rounds: Sequence[Mapping[str, Block]]) -> list[dict[str, Any]]:
    """Each with its share over `off`, or another contender, as (lower, median, upper), and whether it has the limit."""
    whole = CAPTURED_STEPS + OTHER_STEPS
    rows = [
        ("off again, per captured step", "off again", "wall_s", CAPTURED_STEPS, False),
        ("capture, all of it, per captured step", "capture", "wall_s", CAPTURED_STEPS, False),
        ("capture, all of it, CPU time", "capture", "cpu_s", CAPTURED_STEPS, False),
        ("capture, without start and stop", "capture", "captured_s", CAPTURED_STEPS, True),
        (f"capture, one in {CADENCE_STEPS} steps", "capture", "wall_s", CADENCE_STEPS, True),
        ("samples, captured steps, over capture without", "capture", "captured_s", CAPTURED_STEPS, True, "no samples"),
        ("samples, all of a capture, over capture without", "capture", "wall_s", whole, True, "no samples"),
        ("samples, CPU time, over capture without", "capture", "cpu_s", whole, False, "no samples"),
        ("off again, all steps", "off again", "wall_s", whole, False),
        ("watch, all steps", "watch", "wall_s", whole, True),
        ("watch, all steps, CPU time", "watch", "cpu_s", whole, False),
    ]
    return [
        {"name": name, "share": interval(_shares(rounds, who, what, steps, *base)), "limited": limited}
        for name, who, what, steps, limited, *base in rows
    ]


def _shares(rounds: Sequence[Mapping[str, Block]], who: str, what: str, steps: int, base: str = "off") -> list[float]:
    """What a contender took more than `base`, over what `base` takes for so many steps."""
    shares = []
    for blocks in rounds:
        off, on = getattr(blocks[base], what), getattr(blocks[who], what)
        measured_steps = CAPTURED_STEPS if what == "captured_s" else CAPTURED_STEPS + OTHER_STEPS
        shares.append((on - off) / (off * steps / measured_steps))
    return shares


def interval(shares: Sequence[float]) -> tuple[float, float, float]:
    """The median between the ends of its confidence interval."""
    choose = random.Random(0)
    medians = sorted(statistics.median(choose.choices(shares, k=len(shares))) for _ in range(RESAMPLES))
    cut = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return medians[cut], statistics.median(shares), medians[-1 - cut]


def _markdown(record: Mapping[str, Any]) -> str:
    machine, step = record["machine"], record["step"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    stops_s = [blocks["capture"]["stop_s"] for blocks in record["rounds"]]
    rows = [[cost["name"], *(f"{share:+.2%}" for share in cost["share"]), _verdict(cost)] for cost in record["costs"]]
    lines = [
        "# What profiling costs",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}. A step of "
        f"{1e3 * step['median_s']:.0f} ms with {step['events']:,} events; {len(record['rounds'])} rounds, captures of "
        f"{CAPTURED_STEPS} steps. A capture's end held the program up for {1e3 * statistics.median(stops_s):.2g} ms.",
        "",
        *table(
            ["cost over off", f"{CONFIDENCE:.0%} from", "median", "to", f"at most {LIMIT_SHARE:.0%}"],
            rows,
        ),
        "",
        "All of a capture: to start, record, stop, encode and write it, until its files are there.",
    ]
    return "\n".join(lines) + "\n"


def _verdict(cost: Mapping[str, Any]) -> str:
    """Whether the limit is kept, as far as the interval tells."""
    if not cost["limited"]:
        return ""
    lower, _, upper = cost["share"]
    return "yes" if upper <= LIMIT_SHARE else "no" if lower > LIMIT_SHARE else "not told"


def _median_step_s(rounds: Sequence[Mapping[str, Block]]) -> float:
    return statistics.median(blocks["off"].captured_s for blocks in rounds) / CAPTURED_STEPS


if __name__ == "__main__":
    main()
