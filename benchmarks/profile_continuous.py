"""Measures what sampled Python stacks and the continuous mode take from a training run and from a served model.

    nox -s bench -- profile_continuous                  # 12 rounds, 20 minutes
    nox -s bench -- profile_continuous --rounds 2 --block-s 2

The training run does steps of 50 ms as fast as it can; the engine decodes 8 sequences at a time. A contender runs a
block between two plain blocks, and its rate is relative to their mean, which cancels a machine that slowly changes:
`off again` is a third plain block, `samples` has a sampler of Python stacks at 100 Hz, and `continuous` the continuous
mode. It takes a capture every 5 seconds instead of every minute, so that it always takes as much as its limit permits;
its block continues until the pauses have made up for its last capture, which is written before the block ends.
Processor time is per unit of work. Confidence intervals are of the median, by bootstrap over rounds. Writes
`results/profile_continuous.md` and `.json`, and fails if a rate is surely more than 1% lower; below five rounds,
nothing is sure.
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
from stack_profile.captures.stacks import StackSampler
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine

LIMIT_SHARE = 0.01
SETTINGS = ContinuousConfig(every_s=5.0)
WORKLOAD = Workload(layers=4, embed=256, heads=4, kv_heads=2, mlp=704, vocab=8000, prompt_tokens=32, new_tokens=64)
SEQUENCES = 8
_SURE_ROUNDS = 5
CONTENDERS = ("off again", "samples", "continuous")


@dataclass(frozen=True)
class Block:
    """Work of one contender: steps or tokens per second of wall time, and processor seconds for each."""

    rate: float
    cpu_s: float

    def mean(self, other: "Block") -> "Block":
        return Block((self.rate + other.rate) / 2, (self.cpu_s + other.cpu_s) / 2)


@dataclass(frozen=True)
class Pair:
    """A contender's block, and the mean of the plain blocks before and after it."""

    off: Block
    on: Block


class Steps:
    """The training run: a block is a number of steps."""

    unit = "steps"

    def __init__(self) -> None:
        self._training = Training()

    def work(self, step: Callable[[], Any]) -> int:
        self._training.run(1, step)
        return 1

    @staticmethod
    def continuous(folder: Path) -> Watch:
        return Watch(folder, AnomalyConfig(), continuous=SETTINGS)


class Tokens:
    """The served model: a block is a number of tokens."""

    unit = "tokens"

    def __init__(self, folder: Path) -> None:
        checkpoint = open_for_generation(str(write_checkpoint(folder, WORKLOAD, dtype="bfloat16")))
        config = EngineConfig(max_tokens=WORKLOAD.prompt_tokens + WORKLOAD.new_tokens, max_sequences=SEQUENCES)
        self._engine = LLMEngine(checkpoint, config)
        self._engine.warm_up()
        self._engine.start()
        self._asked = 0

    def work(self, step: Callable[[], Any]) -> int:
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
        return len(batch) * WORKLOAD.new_tokens

    @staticmethod
    def continuous(folder: Path) -> Continuous:
        return Continuous(folder, SETTINGS)

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--block-s", type=float, default=6.0, help="minimum seconds of one block, of which a round has 14"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.block_s < 1:
        parser.error("--rounds must be at least 2, and --block-s at least 1")
    with tempfile.TemporaryDirectory() as folder:
        tokens = Tokens(Path(folder, "model"))
        programs: list[Steps | Tokens] = [Steps(), tokens]
        rounds = _measured(programs, Path(folder), arguments.rounds, arguments.block_s)
        tokens.close()
    record = {
        **circumstances(),
        "block_s": arguments.block_s,
        "continuous": asdict(SETTINGS),
        "limit_share": LIMIT_SHARE,
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
    programs: Sequence[Steps | Tokens], folder: Path, rounds: int, block_s: float
) -> list[dict[str, dict[str, Pair]]]:
    order, measured = random.Random(0), []
    for number in range(rounds + 1):
        found: dict[str, dict[str, Pair]] = {}
        for program in programs:
            pairs, before = {}, _block(program, "off", folder, block_s)
            for name in order.sample(CONTENDERS, len(CONTENDERS)):
                block = _block(program, name, folder / f"{program.unit}_{number}", block_s)
                after = _block(program, "off", folder, block_s)
                pairs[name], before = Pair(before.mean(after), block), after
            found[program.unit] = pairs
        measured.append(found)
    return measured[1:]  # the first round warms up


def _block(program: Steps | Tokens, name: str, ring: Path, block_s: float) -> Block:
    count, cpu_s, started_s = 0, time.process_time(), time.perf_counter()
    with _contender(program, name, ring) as (step, may_end):
        while time.perf_counter() < started_s + block_s or not may_end():
            count += program.work(step)
    return Block(count / (time.perf_counter() - started_s), (time.process_time() - cpu_s) / count)


@contextlib.contextmanager
def _contender(
    program: Steps | Tokens, name: str, ring: Path
) -> Iterator[tuple[Callable[[], Any], Callable[[], bool]]]:
    """Yields the context of each step, and a function that returns whether the block may end."""
    if name == "continuous":
        with program.continuous(ring) as mode:
            step = mode.step if isinstance(mode, Watch) else contextlib.nullcontext
            yield step, lambda: mode.is_within_share
        return
    sampler = StackSampler() if name == "samples" else None
    if sampler is not None:
        sampler.start()
    try:
        yield contextlib.nullcontext, lambda: True
    finally:
        if sampler is not None:
            sampler.stop()


def _losses(rounds: Sequence[Mapping[str, Mapping[str, Pair]]]) -> list[dict[str, Any]]:
    """Returns the loss of rate and the growth of processor time of each contender, as (lower, median, upper)."""
    found = []
    for unit in rounds[0]:
        for name in CONTENDERS:
            pairs = [each[unit][name] for each in rounds]
            for label, shares, limited in (
                (f"{name}, {unit}/s lost", [1 - pair.on.rate / pair.off.rate for pair in pairs], name != "off again"),
                (
                    f"{name}, more CPU time per unit of {unit}",
                    [pair.on.cpu_s / pair.off.cpu_s - 1 for pair in pairs],
                    False,
                ),
            ):
                found.append({"name": label, "share": interval(shares), "limited": limited})
    return found


def _markdown(record: Mapping[str, Any]) -> str:
    machine, rounds = record["machine"], record["rounds"]
    rates = {unit: statistics.median(each[unit]["samples"]["off"]["rate"] for each in rounds) for unit in rounds[0]}
    rows = [[loss["name"], *(f"{share:+.2%}" for share in loss["share"]), _verdict(loss)] for loss in record["losses"]]
    plain = ", ".join(f"{rate:,.0f} {unit}/s" for unit, rate in rates.items())
    lines = [
        "# Cost of sampled Python stacks and of the continuous mode",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {len(rounds)} rounds of blocks of "
        f"at least {record['block_s']:g} s; {plain} without either.",
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
