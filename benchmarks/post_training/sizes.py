"""What all contenders compute: one Llama in float32, prompts of characters, and how a turn is asked for."""

import itertools
import json
import random
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

VOCAB, LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 512, 4, 128, 4, 2, 32, 384
ROWS, MANY_ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 16, 32
SFT_ROWS, SFT_TOKENS = 8, 128
GROUPS, GROUP_SIZE = 4, 4
WARM_UP, STEPS = 3, 8
LETTERS = string.ascii_letters + string.digits + " "
END = len(LETTERS)


def prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=PROMPT_TOKENS)) for _ in range(count)]


def reward(text: str) -> float:
    return float(text.count("e"))


class Stamps:
    """An iterable that notes the CPU and wall time at which each batch is asked for."""

    def __init__(self, batches: Any) -> None:
        self._batches, self.times = iter(batches), list[tuple[float, float]]()

    def __iter__(self) -> "Stamps":
        return self

    def __next__(self) -> Any:
        self.times.append((time.process_time(), time.perf_counter()))
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def steps(self) -> list[tuple[float, float]]:
        """CPU and wall seconds of each step after the warm-up."""
        times = self.times[WARM_UP:]
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def serve(work: Mapping[str, Callable[[], Sequence[tuple[float, float]]]]) -> None:
    """Does what each line names; prints the seconds of CPU and wall of every repetition."""
    print(json.dumps("ready"), flush=True)
    for line in _lines():
        print(json.dumps(work[line]()), flush=True)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()
