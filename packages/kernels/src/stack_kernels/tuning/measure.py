"""Times several computations side by side, each until its result is ready rather than until its dispatch.

The computations take turns, so a temporary slowdown of the machine affects all of them alike. A round calls each once,
in an order that changes from round to round; a call too short for the clock is repeated within its turn.

A GPU or TPU executes calls in order, so a turn waits only for its last call: the host dispatches the next call while
the device computes, and the time is the device's.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax

__all__ = ["MIN_ROUNDS", "Measured", "Ratio", "Timing", "measure"]

K = TypeVar("K", bound=Hashable)

# In shorter turns, the clock and the loop would be a part of the result.
_SHORTEST_TURN_S = 1e-3
_MAX_CALLS_A_TURN = 1000
# On devices that execute in order, the wait for the last call is shared by this many, or by as many as take 30 ms:
# there the wait is a thousandth.
_MIN_CALLS_IN_ORDER = 10
_LONG_TURN_S = 30e-3
MIN_ROUNDS = 5
"""Minimum number of rounds for a decision; with fewer, a single disturbed round could reverse it."""
# Before MIN_ROUNDS, a candidate is dropped only if its best round takes this many times the leader's worst.
_HOPELESS = 3.0


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by round.

    Attributes:
      wall_s: wall time until the result was ready.
      cpu_s: CPU time of all threads of this process during the call.
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
        """The interquartile range over the median; with two rounds their full range, with one round 0."""
        if self.rounds < 3:
            return (max(self.wall_s) - min(self.wall_s)) / self.median_s
        low, _, high = statistics.quantiles(self.wall_s, n=4, method="inclusive")
        return (high - low) / self.median_s

    def ratio_to(self, other: "Timing", *, confidence: float = 0.95) -> "Ratio":
        """Returns the ratio of this timing to another over the rounds that both have, which ran next to each other."""
        return Ratio.of([one / two for one, two in zip(self.wall_s, other.wall_s, strict=False)], confidence)


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, with a confidence interval for the true median.

    The interval comes from the sign test (order statistics), which makes no assumption about the distribution of times.

    Attributes:
      median: median of the ratios.
      low: lower end; 0 if there are too few rounds for the confidence (95% needs 6).
      high: upper end; infinite if there are too few rounds.
      confidence: confidence level of the interval.
    """

    median: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, ratios: Sequence[float], confidence: float) -> "Ratio":
        """Computes the ratio and its interval from at least one paired ratio."""
        ordered, total = sorted(ratios), len(ratios)
        outside, below = -1, 0.0  # number of order statistics dropped at either end
        while outside + 1 < total / 2:
            below += math.comb(total, outside + 1) / 2**total
            if 2 * below > 1 - confidence:
                break
            outside += 1
        bounds = (0.0, math.inf) if outside < 0 else (ordered[outside], ordered[total - 1 - outside])
        return cls(statistics.median(ordered), *bounds, confidence)


@dataclass(frozen=True)
class Measured(Generic[K]):
    """Result of `measure`.

    Attributes:
      timings: timings of the computations that ran, at least one round each.
      errors: exceptions of the computations that failed in their first call.
      interrupted: Ctrl-C ended the measurement; the timings cover the rounds completed until then.
      out_of_time: the budget ended before a decision.
    """

    timings: Mapping[K, Timing]
    errors: Mapping[K, Exception]
    interrupted: bool = False
    out_of_time: bool = False


@dataclass
class _Candidate:
    """One computation.

    Attributes:
      call: the function to time.
      in_order: the device executes calls one after another.
      calls_a_turn: number of calls per turn.
    """

    call: Callable[[], Any]
    in_order: bool = False
    calls_a_turn: int = 1
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def warm_up(self, *, compiled: bool) -> None:
        """Compiles the call, then times one call to set the number of calls per turn."""
        if not compiled:
            jax.block_until_ready(self.call())
        started_s = time.perf_counter()
        jax.block_until_ready(self.call())
        duration_s = max(time.perf_counter() - started_s, 1e-9)
        fewest = min(_MIN_CALLS_IN_ORDER, math.ceil(_LONG_TURN_S / duration_s)) if self.in_order else 1
        self.calls_a_turn = min(max(math.ceil(_SHORTEST_TURN_S / duration_s), fewest), _MAX_CALLS_A_TURN)

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

    Each candidate is first called twice, to compile it and to estimate its duration; candidates that raise are dropped.
    Ctrl-C ends the measurement and keeps the results so far. The first round always completes, regardless of the
    budget.

    Args:
      candidates: functions without arguments, by any key; the measurement waits for their results.
      budget_s: wall seconds, compilation included, after which no further turn begins. A candidate that was not reached
        has no timing.
      rounds: maximum number of turns per candidate.
      stop_early: drop candidates that are clearly slower than the fastest from later rounds, and stop when one
        candidate remains. If False, all candidates have the same number of rounds.
      compiled: the candidates have been called before, so one warm-up call is enough.
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
            except Exception as error:  # A candidate may fail in any way; the others go on.
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
    """Runs the rounds; returns False if the budget ended them early. Each candidate has a turn in the first round."""
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
            if len(running) == 1 and number + 1 >= MIN_ROUNDS:
                break
    return True


def _is_beaten(candidate: _Candidate, best: _Candidate) -> bool:
    """Checks whether a candidate is clearly slower than the best.

    It is if its fastest round is slower than every round of the best (times `_HOPELESS` before the fifth round), or if
    the ratio's interval lies above 1.
    """
    count = len(candidate.wall_s)
    margin = 1.0 if count >= MIN_ROUNDS else _HOPELESS
    if count >= 2 and min(candidate.wall_s) > margin * max(best.wall_s):
        return True
    return candidate.timing().ratio_to(best.timing()).low > 1.0
