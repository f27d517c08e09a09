"""Whether calls became slower than a baseline says, by what drift of the machine does not touch: ratios to a yardstick.

Both runs timed each call in turns with core's reference. Compared are the ratios of the rounds: a regression is a call
whose ratios are greater than the baseline's by more than a tolerance, by the one-sided Mann-Whitney test. Its exact
distribution needs nothing to be known of how times are distributed. The confidence is that of the whole comparison: at
99% one in a hundred comparisons of a program with itself names any call (Bonferroni: the error of each of n tests is a
n-th of it), if its rounds vary as those of the baseline do. Two processes differ in more than that, such as where their
arrays lie, which is why `stack bench ops` measures again whatever is named, and why there is a tolerance.

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
    """One call beside the baseline.

    Attributes:
      before: the baseline's row; None where it has none.
      change: its ratio to the yardstick over the baseline's, of medians; 1.1 is a tenth slower.
      p: the probability of ratios like these, or greater, in a call that is not slower by more than the tolerance.
    """

    now: Row
    before: Row | None
    change: float | None
    p: float | None
    verdict: Verdict


def compare(baseline: Results, rows: Sequence[Row], *, tolerance: float) -> tuple[Comparison, ...]:
    """Compares each row with the baseline's of the same call.

    Args:
      tolerance: the share by which a call may be slower, 0.05 is 5%.
    """
    known = {row.key: row for row in baseline.rows}
    tests = max(sum(row.key in known for row in rows), 1)
    return tuple(_compared(row, known.get(row.key), tolerance, (1 - CONFIDENCE) / tests) for row in rows)


def check_comparable(baseline: Results, chip: Chip, calls: Iterable[tuple[str, ...]], *, where: str) -> None:
    """Raises BenchmarkError where the baseline was measured on other hardware, or has none of the calls."""
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
    if _smallest_p(len(now.ratios), len(before.ratios)) > error:
        return Comparison(now, before, change, slower, "too few rounds")
    if slower <= error:
        return Comparison(now, before, change, slower, "slower")
    faster = _p_greater([ratio / (1 + tolerance) for ratio in before.ratios], now.ratios)
    return Comparison(now, before, change, slower, "faster" if faster <= error else "unchanged")


def _p_greater(sample: Sequence[float], other: Sequence[float]) -> float:
    """The chance of so many pairs with the first greater, or more, if both are drawn alike; a tie is not greater."""
    wins = sum(one > two for one in sample for two in other)
    counts = _orders(len(sample), len(other))
    return sum(counts[wins:]) / sum(counts)


def _smallest_p(sample_size: int, other_size: int) -> float:
    return 1 / math.comb(sample_size + other_size, sample_size)


@functools.cache
def _orders(sample_size: int, other_size: int) -> tuple[int, ...]:
    """In how many orders of two samples there are 0, 1, ... pairs in which the first is greater."""
    if not sample_size or not other_size:
        return (1,)
    counts = [0] * (sample_size * other_size + 1)
    # The greatest of all is of the first sample, and greater than all of the other; or it is of the other.
    for wins, orders in enumerate(_orders(sample_size - 1, other_size)):
        counts[wins + other_size] += orders
    for wins, orders in enumerate(_orders(sample_size, other_size - 1)):
        counts[wins] += orders
    return tuple(counts)
