"""Regression test against a baseline, based on ratios to the reference, which are immune to drift of the machine.

Both runs timed each call in turns with core's reference. The test compares the ratios of the rounds: a call regressed
if its ratios exceed the baseline's by more than a tolerance, by the one-sided Mann-Whitney test, whose exact
distribution makes no assumption about how times are distributed. The confidence applies to the comparison of all calls:
at 99%, one in a hundred comparisons of a program with itself reports any regression (Bonferroni: each of n tests gets
an n-th of the error), if rounds vary as in the baseline. Two processes differ in more than that, for example in the
placement of their arrays. Therefore `stack bench ops` repeats the measurement of each reported call, and there is a
tolerance.

Source: Mann and Whitney, On a Test of Whether one of Two Random Variables is Stochastically Larger, 1947.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stack_core.abi.errors import BenchmarkError
from stack_core.chips import Chip
from stack_kernels.bench.results import Results, Row

__all__ = ["CONFIDENCE", "Comparison", "check_comparable", "compare"]

CONFIDENCE = 0.99

Verdict = Literal["slower", "faster", "unchanged", "too few rounds", "new"]


@dataclass(frozen=True)
class Comparison:
    """One call compared with the baseline.

    Attributes:
      now: row of this run.
      before: row of the baseline; None if the baseline lacks the call.
      change: ratio of medians, each relative to the reference, over the baseline's; 1.1 is a tenth slower.
      p: probability of such ratios or greater for a call that is not slower by more than the tolerance.
      verdict: result of the test.
    """

    now: Row
    before: Row | None
    change: float | None
    p: float | None
    verdict: Verdict


def compare(baseline: Results, rows: Sequence[Row], *, tolerance: float) -> tuple[Comparison, ...]:
    """Compares each row with the baseline's row of the same call.

    Args:
      baseline: results of an earlier run.
      rows: rows of this run.
      tolerance: relative slowdown that is tolerated; 0.05 is 5%.
    """
    known = {row.key: row for row in baseline.rows}
    tests = max(sum(row.key in known for row in rows), 1)
    return tuple(_compared(row, known.get(row.key), tolerance, (1 - CONFIDENCE) / tests) for row in rows)


def check_comparable(baseline: Results, chip: Chip, calls: Iterable[tuple[str, ...]], *, where: str) -> None:
    """Raises BenchmarkError if the baseline was measured on other hardware or contains none of the calls."""
    if (baseline.chip, baseline.model) != (chip.kind, chip.model):
        here = f"{chip.kind} ({chip.model})" if chip.model else chip.kind
        raise BenchmarkError(
            f"The baseline {where!r} was measured on {baseline.chip_name}, and this is {here}; ratios to the reference "
            "differ there. Compare with a baseline of this chip, which `stack bench ops --json FILE` makes."
        )
    titles = {row.key: row.title for row in baseline.rows}
    if titles.keys().isdisjoint(calls):
        has = f"{len(titles)}, such as {next(iter(titles.values()))!r}" if titles else "none at all"
        raise BenchmarkError(
            f"The baseline {where!r} has none of the calls that were asked for; it has {has}. Ask for what it has, or "
            "make a baseline with the same options."
        )


def _compared(now: Row, before: Row | None, tolerance: float, error: float) -> Comparison:
    if before is None:
        return Comparison(now, None, None, None, "new")
    change = now.ratio / before.ratio
    slower = _p_greater(now.ratios, [ratio * (1 + tolerance) for ratio in before.ratios])
    # So few rounds could not reach the confidence, however slow they were.
    if _smallest_p(len(now.ratios), len(before.ratios)) > error:
        return Comparison(now, before, change, slower, "too few rounds")
    if slower <= error:
        return Comparison(now, before, change, slower, "slower")
    faster = _p_greater([ratio / (1 + tolerance) for ratio in before.ratios], now.ratios)
    return Comparison(now, before, change, slower, "faster" if faster <= error else "unchanged")


def _p_greater(sample: Sequence[float], other: Sequence[float]) -> float:
    """Returns the probability of at least this many pairs with the first greater if both samples have one distribution.

    A tie counts as not greater.
    """
    wins = sum(one > two for one in sample for two in other)
    counts = _orders(len(sample), len(other))
    return sum(counts[wins:]) / sum(counts)


def _smallest_p(sample_size: int, other_size: int) -> float:
    return 1 / math.comb(sample_size + other_size, sample_size)


@functools.cache
def _orders(sample_size: int, other_size: int) -> tuple[int, ...]:
    """Counts the orders of two samples by their number of pairs (0, 1, ...) in which the first is greater."""
    if not sample_size or not other_size:
        return (1,)
    counts = [0] * (sample_size * other_size + 1)
    # The greatest value is either in the first sample, and then exceeds all of the second sample, or in the second
    # sample.
    for wins, orders in enumerate(_orders(sample_size - 1, other_size)):
        counts[wins + other_size] += orders
    for wins, orders in enumerate(_orders(sample_size, other_size - 1)):
        counts[wins] += orders
    return tuple(counts)
