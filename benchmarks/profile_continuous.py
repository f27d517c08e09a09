"""Measures what sampled Python stacks and the continuous mode take from a training run and from a served model.

    nox -s bench -- profile_continuous                  # 20 rounds, 13 minutes
    nox -s bench -- profile_continuous --rounds 2

The training run does steps of 50 ms as fast as it can; the engine decodes 8 sequences at a time. A contender's block
has a plain block of as much work before and after it, and its time is relative to their mean, which cancels a machine
that slowly changes. Blocks are short, so that many of them average what changes quickly.

- `off again` is a third plain block: what chance makes.
- `samples` has a sampler of Python stacks with ten times its default rate; a tenth of its loss is that of the default.
- `continuous` is the continuous mode with up to 10% of a processor, a capture of normal steps every three seconds, and
  recordings for slow steps in between. Its loss is scaled down from the share that it measured to the default share.

Confidence intervals are of the median, by bootstrap over rounds. Writes `results/profile_continuous.md` and `.json`,
and fails if a loss is surely over 1%; below five rounds, nothing is sure.
"""

import argparse
import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profile_overhead import Training, interval
from report import RESULTS, circumstances, table, write
from serving.checkpoint import write_checkpoint
from serving.workload import Workload, prompts

from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_profile import AnomalyConfig, Continuous, ContinuousConfig, Watch
from stack_profile.captures.stacks import STACKS_HZ, StackSampler
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine

LIMIT_SHARE = 0.01
DEFAULTS = ContinuousConfig()
# Captures and recordings for slow steps take turns after the first capture of normal steps.
CONTINUOUS = ContinuousConfig(every_s=3.0, share=0.1)
CONTINUOUS_AFTER_S = 4.4
WORKLOAD = Workload(layers=4, embed=256, heads=4, kv_heads=2, mlp=704, vocab=8000, prompt_tokens=32, new_tokens=64)
SEQUENCES = 8
CONTENDERS = ("off again", "samples", "continuous")
_SURE_ROUNDS = 5
_TIMES_THE_SAMPLES = 10
SHORT_S, LONG_S = 0.4, 1.5  # seconds of a plain block, the longer beside `continuous`


@dataclass(frozen=True)
class Block:
    """Wall and processor seconds of a unit of work, and the contender's own share of a processor in the block."""

    wall_s: float
    cpu_s: float
    share: float


@dataclass(frozen=True)
class Pair:
    """Growth of wall and processor time from the plain blocks before and after a contender's block."""

    wall: float
    cpu: float
    share: float


class Steps:
    """The training run: a unit of work is a step."""

    unit = "steps"
    count = 1
    warm_units = 12  # a watch judges steps after ten

    def __init__(self) -> None:
        self._training = Training()

    def work(self, step: Callable[[], Any]) -> None:
        self._training.run(1, step)

    @staticmethod
    def continuous(folder: Path, settings: ContinuousConfig) -> Watch:
        return Watch(folder, AnomalyConfig(), continuous=settings)


class Tokens:
    """The served model: a unit of work is a batch of sequences."""

    unit = "tokens"
    count = SEQUENCES * WORKLOAD.new_tokens
    warm_units = 1

    def __init__(self, folder: Path) -> None:
        checkpoint = open_for_generation(str(write_checkpoint(folder, WORKLOAD, dtype="bfloat16")))
        config = EngineConfig(max_tokens=WORKLOAD.prompt_tokens + WORKLOAD.new_tokens, max_sequences=SEQUENCES)
        self._engine = LLMEngine(checkpoint, config)
        self._engine.warm_up()
        self._engine.start()
        self._asked = 0

    def work(self, step: Callable[[], Any]) -> None:
        del step
        self._asked += 1
        batch = prompts(WORKLOAD, batch=SEQUENCES, seed=self._asked)
        sampling = SamplingParams(max_tokens=WORKLOAD.new_tokens, temperature=0.0, ignore_eos=True)
        left, done = [len(batch)], threading.Event()

        def receive(update: GenerationUpdate) -> None:  # on the thread of the engine
            left[0] -= update.finish_reason is not None
            if not left[0]:
                done.set()

        for number, prompt in enumerate(batch):
            name = f"{self._asked}-{number}"
            self._engine.submit(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling), receive)
        done.wait()

    @staticmethod
    def continuous(folder: Path, settings: ContinuousConfig) -> Continuous:
        return Continuous(folder, settings)

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of some 40 s each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2")
    with tempfile.TemporaryDirectory() as folder:
        programs: list[Steps | Tokens] = [Steps(), Tokens(Path(folder, "model"))]
        rates, rounds = _measured(programs, Path(folder), arguments.rounds)
        programs[1].close()
    record = {
        **circumstances(),
        "settings": {"default": asdict(DEFAULTS), "measured": asdict(CONTINUOUS)},
        "limit_share": LIMIT_SHARE,
        "rates": rates,
        "losses": _losses(rounds),
        "rounds": [
            {unit: {name: asdict(pair) for name, pair in pairs.items()} for unit, pairs in each.items()}
            for each in rounds
        ],
    }
    write(arguments.results, "profile_continuous", record, _markdown(record))
    if len(rounds) >= _SURE_ROUNDS and any(
        loss["limited"] and loss["share"][0] > LIMIT_SHARE for loss in record["losses"]
    ):
        raise SystemExit("surely over the limit")


def _measured(
    programs: Sequence[Steps | Tokens], folder: Path, rounds: int
) -> tuple[dict[str, float], list[dict[str, dict[str, Pair]]]]:
    """Returns the plain rate of each program, and the pairs of each round by unit and contender."""
    order, measured, plain = random.Random(0), [], {program.unit: [] for program in programs}
    for number in range(rounds + 1):
        found: dict[str, dict[str, Pair]] = {}
        for program in programs:
            pairs = {}
            for name in order.sample(CONTENDERS, len(CONTENDERS)):
                units = _units(program, LONG_S if name == "continuous" else SHORT_S)
                before = _block(program, "off", folder, units)
                on = _block(program, name, folder / f"{program.unit}_{name}_{number}", 2 * units)
                after = _block(program, "off", folder, units)
                wall_s, cpu_s = (before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2
                pairs[name] = Pair(on.wall_s / wall_s - 1, on.cpu_s / cpu_s - 1, on.share)
                plain[program.unit].append(program.count / wall_s)
            found[program.unit] = pairs
        measured.append(found)
    measured = measured[1:]  # the first round warms up
    for program in programs:
        shares = [each[program.unit]["continuous"].share for each in measured]
        if statistics.median(shares) < DEFAULTS.share:
            raise SystemExit(f"the continuous mode of {program.unit} took less than its default share: {shares}")
    return {unit: statistics.median(rates[len(CONTENDERS) :]) for unit, rates in plain.items()}, measured


def _units(program: Steps | Tokens, seconds: float) -> int:
    started_s = time.perf_counter()
    program.work(contextlib.nullcontext)
    return max(1, round(seconds / (time.perf_counter() - started_s)))


def _block(program: Steps | Tokens, name: str, ring: Path, units: int) -> Block:
    with _contender(program, name, ring) as (step, cost_s):
        until_s = time.perf_counter() + (CONTINUOUS_AFTER_S if name == "continuous" else 0)
        for _ in range(program.warm_units):
            program.work(step)
        while time.perf_counter() < until_s:
            program.work(step)
        used_s, cpu_s, started_s = cost_s(), time.process_time(), time.perf_counter()
        for _ in range(units):
            program.work(step)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        return Block(wall_s / units, cpu_s / units, (cost_s() - used_s) / wall_s)


@contextlib.contextmanager
def _contender(
    program: Steps | Tokens, name: str, ring: Path
) -> Iterator[tuple[Callable[[], Any], Callable[[], float]]]:
    """Yields the context of each step, and a function that returns the processor time of a contender so far."""
    if name == "continuous":
        with program.continuous(ring, CONTINUOUS) as mode:
            yield (mode.step if isinstance(mode, Watch) else contextlib.nullcontext), lambda: mode.cost_s
    elif name == "samples":
        sampler = StackSampler(_TIMES_THE_SAMPLES * STACKS_HZ)
        sampler.start()
        try:
            yield contextlib.nullcontext, lambda: sampler.cpu_s
        finally:
            sampler.stop()
    else:
        yield contextlib.nullcontext, lambda: 0.0


def _losses(rounds: Sequence[Mapping[str, Mapping[str, Pair]]]) -> list[dict[str, Any]]:
    """Returns each loss of rate and growth of processor time as (lower, median, upper)."""
    found = []
    for unit in rounds[0]:
        pairs = {name: [each[unit][name] for each in rounds] for name in CONTENDERS}
        share = statistics.mean(pair.share for pair in pairs["continuous"])
        scales = {"off again": 1.0, "samples": 1 / _TIMES_THE_SAMPLES, "continuous": DEFAULTS.share / share}
        for kind in ("wall", "cpu"):
            grown = {name: [scales[name] * getattr(pair, kind) for pair in pairs[name]] for name in CONTENDERS}
            label = f"{unit}/s lost" if kind == "wall" else f"more CPU time per unit of {unit}"
            for name, shares in grown.items():
                limited = kind == "wall" and name in ("samples", "continuous")
                found.append({"name": f"{name}, {label}", "share": interval(shares), "limited": limited})
    return found


def _markdown(record: Mapping[str, Any]) -> str:
    machine, rounds = record["machine"], record["rounds"]
    rows = [[loss["name"], *(f"{share:+.2%}" for share in loss["share"]), _verdict(loss)] for loss in record["losses"]]
    plain = ", ".join(f"{rate:,.0f} {unit}/s" for unit, rate in record["rates"].items())
    lines = [
        "# Cost of sampled Python stacks and of the continuous mode",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {len(rounds)} rounds; {plain} without either.",
        "",
        *table(["relative to off", "95% from", "median", "to", f"at most {LIMIT_SHARE:.0%}"], rows),
    ]
    return "\n".join(lines) + "\n"


def _verdict(loss: Mapping[str, Any]) -> str:
    if not loss["limited"]:
        return ""
    lower, _, upper = loss["share"]
    return "yes" if upper <= LIMIT_SHARE else "no" if lower > LIMIT_SHARE else "not decided"


if __name__ == "__main__":
    main()
