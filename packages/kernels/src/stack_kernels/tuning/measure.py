"""Times several computations side by side, each to its completion and not to its dispatch.

On a GPU or TPU, which computes in the order of the calls, a turn waits for its last call alone: the host hands over the
next call while the device computes, so that what is timed is the device.

They take turns, so that whatever slows the machine down for a while slows all of them alike. A round calls each once,
in an order that changes from round to round; a call that is too short for the clock is repeated within its turn.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax

__all__ = ["FEWEST_ROUNDS", "Measured", "Ratio", "Timing", "measure"]

K = TypeVar("K", bound=Hashable)

_SHORTEST_TURN_S = 1e-3
_MOST_CALLS_A_TURN = 1000
_FEWEST_CALLS_IN_ORDER = 10
FEWEST_ROUNDS = 5
"""Fewer decide nothing: one that was disturbed could reverse a choice."""
_HOPELESS = 3.0


@dataclass(frozen=True)
class Timing:
    """Seconds that one call took, round by round.

    Attributes:
      wall_s: until the result was there.
      cpu_s: of all threads of this process meanwhile.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    @property
    def rounds(self) -> int:
        return len(self.wall_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median; with two rounds their whole range, with one 0."""
        if self.rounds < 3:
            return (max(self.wall_s) - min(self.wall_s)) / self.median_s
        low, _, high = statistics.quantiles(self.wall_s, n=4, method="inclusive")
        return (high - low) / self.median_s

    def ratio_to(self, other: "Timing", *, confidence: float = 0.95) -> "Ratio":
        """How many times as long this one took, by the rounds that both have, which ran next to each other."""
        return Ratio.of([one / two for one, two in zip(self.wall_s, other.wall_s, strict=False)], confidence)


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and the interval that holds the true median with the stated confidence.

    The interval is that of the sign test, from order statistics: nothing is assumed of how times are distributed.

    Attributes:
      low: 0 where there are too few rounds for the confidence, 6 for 95%.
      high: likewise infinite.
    """

    median: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, ratios: Sequence[float], confidence: float) -> "Ratio":
        """Of at least one ratio."""
        ordered, total = sorted(ratios), len(ratios)
        outside, below = -1, 0.0  # how many may be left out at either end
        while outside + 1 < total / 2:
            below += math.comb(total, outside + 1) / 2**total
            if 2 * below > 1 - confidence:
                break
            outside += 1
        bounds = (0.0, math.inf) if outside < 0 else (ordered[outside], ordered[total - 1 - outside])
        return cls(statistics.median(ordered), *bounds, confidence)


@dataclass(frozen=True)
class Measured(Generic[K]):
    """What `measure` found.

    Attributes:
      timings: of what ran, at least one round each.
      errors: of what raised when it was first called.
      interrupted: Ctrl-C ended it; the timings are those of the rounds until then.
      out_of_time: the budget ended it before it was decided.
    """

    timings: Mapping[K, Timing]
    errors: Mapping[K, Exception]
    interrupted: bool = False
    out_of_time: bool = False


@dataclass
class _Candidate:
    """One computation; `in_order` says that its device computes calls one after another."""

    call: Callable[[], Any]
    in_order: bool = False
    calls_a_turn: int = 1
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def warm_up(self, *, compiled: bool) -> None:
        """Compiles, and then sees how long a call takes."""
        if not compiled:
            jax.block_until_ready(self.call())
        started_s = time.perf_counter()
        jax.block_until_ready(self.call())
        duration_s = max(time.perf_counter() - started_s, 1e-9)
        fewest = _FEWEST_CALLS_IN_ORDER if self.in_order else 1
        self.calls_a_turn = min(max(math.ceil(_SHORTEST_TURN_S / duration_s), fewest), _MOST_CALLS_A_TURN)

    def take_turn(self) -> None:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for number in range(self.calls_a_turn):
            result = self.call()
            if not self.in_order or number == self.calls_a_turn - 1:
                jax.block_until_ready(result)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        self.wall_s.append(wall_s / self.calls_a_turn)
        self.cpu_s.append(cpu_s / self.calls_a_turn)

    def timing(self) -> Timing:
        rounds = min(len(self.wall_s), len(self.cpu_s))  # Ctrl-C may have come between the two
        return Timing(tuple(self.wall_s[:rounds]), tuple(self.cpu_s[:rounds]))


def measure(
    candidates: Mapping[K, Callable[[], Any]],
    *,
    budget_s: float = math.inf,
    rounds: int = 15,
    stop_early: bool = True,
    compiled: bool = False,
    on_round: Callable[[], None] | None = None,
) -> Measured[K]:
    """Times the candidates in turns.

    Each is first called twice, for its compilation and for its length; what raises then is left out. Ctrl-C ends the
    measurement and keeps what there is. The first round is whole, whatever the budget.

    Args:
      candidates: functions without arguments, by any key; their results are waited for.
      budget_s: wall seconds after which no turn begins, compilation included. A candidate that was not reached has no
        timing.
      rounds: the most turns that one gets.
      stop_early: leave out in later rounds what is clearly slower than the fastest, and end when nothing else is left.
        Without, all candidates have equally many rounds.
      compiled: they were called before, so that once is enough.
      on_round: called after each round, for progress.
    """
    end_s = time.perf_counter() + budget_s
    in_order = jax.default_backend() != "cpu"
    warm: dict[K, _Candidate] = {}
    errors: dict[K, Exception] = {}
    interrupted = out_of_time = False
    try:
        for key, call in candidates.items():
            if time.perf_counter() >= end_s and warm:
                out_of_time = True
                break
            candidate = _Candidate(call, in_order)
            try:
                candidate.warm_up(compiled=compiled)
            except Exception as error:  # What is measured may fail in any way, and costs only itself.
                errors[key] = error
                continue
            warm[key] = candidate
        decided = _take_turns(list(warm.values()), end_s, rounds, stop_early=stop_early, on_round=on_round)
        out_of_time = out_of_time or not decided
    except KeyboardInterrupt:
        interrupted = True
    timings = {key: candidate.timing() for key, candidate in warm.items()}
    return Measured({key: timing for key, timing in timings.items() if timing.rounds}, errors, interrupted, out_of_time)


def _take_turns(
    running: list[_Candidate],
    end_s: float,
    rounds: int,
    *,
    stop_early: bool,
    on_round: Callable[[], None] | None,
) -> bool:
    """Runs the rounds; whether the budget was enough for them. Each candidate has its turn in the first one."""
    for number in range(rounds if running else 0):
        start = number % len(running)
        for candidate in running[start:] + running[:start]:
            if number and time.perf_counter() >= end_s:
                return False
            candidate.take_turn()
        if on_round is not None:
            on_round()
        if stop_early:
            best = min(running, key=lambda candidate: statistics.median(candidate.wall_s))
            running = [candidate for candidate in running if candidate is best or not _is_beaten(candidate, best)]
            if len(running) == 1 and number + 1 >= FEWEST_ROUNDS:
                break
    return True


def _is_beaten(candidate: _Candidate, best: _Candidate) -> bool:
    """Whether it is clearly slower: always, or in all but few rounds; from the second to the fifth by a multiple."""
    count = len(candidate.wall_s)
    margin = 1.0 if count >= FEWEST_ROUNDS else _HOPELESS
    if count >= 2 and min(candidate.wall_s) > margin * max(best.wall_s):
        return True
    return candidate.timing().ratio_to(best.timing()).low > 1.0
