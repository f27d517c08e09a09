"""Significance of differences of means, estimated from repeated, autocorrelated steps.

A stalled step takes many times as long as usual, so means are trimmed: a share of the smallest and of the largest
samples is omitted. Their error is Yuen's, from the winsorized variance. Steps of one capture are autocorrelated: n
steps with correlations rho_k at lag k carry as much information about their mean as n / (1 + 2 (rho_1 + rho_2 + ...))
independent ones. Captures are independent of each other: if both sides have several, the captures' means are the
samples, and the error includes the variation between processes.

Sources: Yuen, The Two-Sample Trimmed t for Unequal Population Variances, 1974; Geyer, Practical Markov Chain Monte
Carlo, 1992 (the initial positive sequence); Welch, The Generalization of Student's Problem, 1947; Benjamini and
Hochberg, Controlling the False Discovery Rate, 1995; Efron, Large-Scale Simultaneous Hypothesis Testing, 2004.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

__all__ = ["Difference", "adjusted", "against_peers", "difference", "student_quantile", "student_tail"]


@dataclass(frozen=True)
class Difference:
    """Differences of two means, for each of several quantities.

    Attributes:
      before, after: means, trimmed or not, averaged over captures.
      error: standard error of `after - before`; NaN if a side has one sample.
      freedom: degrees of freedom of the error.
      of_captures: True if captures are the samples; otherwise steps are, and the error excludes variation between
        captures.
    """

    before: np.ndarray
    after: np.ndarray
    error: np.ndarray
    freedom: np.ndarray
    of_captures: bool

    @property
    def change(self) -> np.ndarray:
        return self.after - self.before

    def at(self, places: np.ndarray) -> "Difference":
        """Returns the differences of some of the quantities."""
        return self._each(lambda name: getattr(self, name)[places])

    def appended(self, other: "Difference") -> "Difference":
        """Appends the quantities of another difference."""
        return self._each(lambda name: np.append(getattr(self, name), getattr(other, name)))

    def _each(self, part: Callable[[str], np.ndarray]) -> "Difference":
        return dataclasses.replace(self, **{name: part(name) for name in ("before", "after", "error", "freedom")})

    def p(self) -> np.ndarray:
        """Returns two-sided p-values; NaN if unknown."""
        return student_tail(_ratio(np.abs(self.change), self.error), self.freedom)

    def interval(self, confidence: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the confidence interval of the difference."""
        half = student_quantile(1 - confidence, self.freedom) * self.error
        return self.change - half, self.change + half


def difference(before: Sequence[np.ndarray], after: Sequence[np.ndarray], *, trim: float = 0.0) -> Difference:
    """Compares the means of two sides.

    Args:
      before, after: samples of each capture in order of time, [step, quantity].
      trim: share of a capture's samples to omit at either end.
    """
    sides = [[_Mean.of(samples, trim) for samples in side] for side in (before, after)]
    first, second = (np.stack([each.mean for each in side]) for side in sides)
    of_captures = min(len(first), len(second)) > 1
    if of_captures:
        count = len(first) + len(second) - 2
        squares = sum(((means - means.mean(axis=0)) ** 2).sum(axis=0) for means in (first, second))
        error = np.sqrt(squares / count * (1 / len(first) + 1 / len(second)))
        freedom = np.full(error.shape, float(count))
    else:
        variances = [each.variance / len(side) ** 2 for side in sides for each in side]
        error, freedom = _welch(np.stack(variances), np.stack([each.freedom for side in sides for each in side]))
    return Difference(first.mean(axis=0), second.mean(axis=0), error, freedom, of_captures)


@dataclass(frozen=True)
class _Mean:
    """Trimmed means of a capture's samples, with the variances of these means and their degrees of freedom."""

    mean: np.ndarray
    variance: np.ndarray
    freedom: np.ndarray

    @classmethod
    def of(cls, samples: np.ndarray, trim: float) -> "_Mean":
        """Computes the means; variances and degrees of freedom are NaN for a single sample."""
        count = len(samples)
        left_out = int(trim * count)
        kept = count - 2 * left_out
        ordered = np.sort(samples, axis=0)
        mean = ordered[left_out : count - left_out].mean(axis=0)
        if count < 2:
            return cls(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
        winsorized = np.clip(samples, ordered[left_out], ordered[count - left_out - 1])
        centred = winsorized - winsorized.mean(axis=0)
        squares = (centred**2).sum(axis=0)
        # Correlated steps count as fewer independent ones.
        freedom = np.maximum(kept / _alike(centred) - 1, _LEAST_FREEDOM)
        # Yuen's squared error, squares / (h (h - 1)), with the number of independent samples for h - 1.
        return cls(mean, squares / kept / freedom, freedom)


def _alike(centred: np.ndarray) -> np.ndarray:
    """Estimates the autocorrelation time: the number of samples, 1 or more, that are worth one independent sample.

    Sums the correlations in pairs of lags while the pairs are positive.
    """
    count = len(centred)
    squares = (centred**2).sum(axis=0)
    # Lag 0 counts once: 1 + 2 (rho_1 + ...) = 2 (rho_0 + rho_1 + ...) - 1.
    total, positive = np.full(squares.shape, -1.0), np.ones(squares.shape, bool)
    for lag in range(0, max(count // 2, 1), 2):
        products = sum((centred[each:] * centred[: count - each]).sum(axis=0) for each in (lag, lag + 1))
        # A constant quantity counts as uncorrelated.
        pair = np.divide(products, squares, out=np.zeros_like(squares), where=squares > 0) + _BIASED / count
        positive &= pair > 0
        total += np.where(positive, 2 * pair, 0.0)
    return np.maximum(total, 1.0)


_BIASED: Final = 2.0  # each estimated correlation is biased by about -1/n, a pair by -2/n
_LEAST_FREEDOM: Final = 1.0  # minimum degrees of freedom, for strongly correlated steps


def _welch(variances: np.ndarray, freedoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the error of a sum of independent parts, and its degrees of freedom."""
    total = variances.sum(axis=0)
    weights = (variances**2 / freedoms).sum(axis=0)
    return np.sqrt(total), np.divide(total**2, weights, out=freedoms.min(axis=0), where=weights > 0)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divides, with x/0 = inf and 0/0 = 0: a difference without variance is certain."""
    quotient = np.divide(numerator, denominator, out=np.full_like(denominator, np.inf), where=denominator != 0)
    return np.where((numerator == 0) & (denominator == 0), 0.0, quotient)


def against_peers(
    found: Difference, peers: Difference, members: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes each difference beyond the change expected from its peers, and its p-value.

    The expected change is relative to the mean before. The null distribution is empirical (Efron): its location is the
    median of the peers' relative differences, its spread comes from the upper quartile of their distances to the
    median. Up to a quarter of the peers may have changed differently.

    Args:
      found: differences to test.
      peers: differences of the peers.
      members: for each difference, the peers that are part of it and therefore excluded.

    Returns:
      The differences beyond the expected change and their p-values, NaN with fewer than three peers.
    """
    relative = peers.change / peers.before
    median, spread, freedom = np.full((3, *found.before.shape), np.nan)
    for place, parts in enumerate(members):
        others = np.delete(relative, list(parts))
        if len(others) >= _LEAST_PEERS:
            median[place] = np.median(others)
            quartile = np.quantile(np.abs(others - median[place]), 0.75)
            # The median of n values adds pi / (2 n) of the variance of one.
            spread[place] = quartile / _NORMAL * math.sqrt(1 + math.pi / 2 / len(others))
            freedom[place] = _EFFICIENCY * (len(others) - 1)
    variances = np.stack([found.error, spread * found.before]) ** 2
    error, freedom = _welch(variances, np.stack([found.freedom, freedom]))
    beyond = found.change - median * found.before
    return beyond, student_tail(_ratio(np.abs(beyond), error), freedom)


_LEAST_PEERS: Final = 3
_NORMAL: Final = 1.1503  # upper quartile of |x| over the standard deviation, for a normal distribution
_EFFICIENCY: Final = 0.5  # efficiency of the quartile as an estimate of the spread, rounded down


def adjusted(p: np.ndarray) -> np.ndarray:
    """Adjusts p-values (Benjamini and Hochberg): values below q have a false discovery rate of q. NaN stays NaN."""
    result = np.full(p.shape, np.nan)
    rows = np.flatnonzero(~np.isnan(p))
    order = rows[np.argsort(p[rows])]
    scaled = p[order] * len(order) / np.arange(1, len(order) + 1)
    # From the largest p down: a smaller p must not be adjusted to a larger value.
    result[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    return result


def student_tail(distance: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Returns the two-sided tail probability of Student's t beyond `distance`; NaN stays NaN."""
    distance, freedom = np.broadcast_arrays(np.asarray(distance, float), np.asarray(freedom, float))
    # The square of a larger number could overflow.
    square = np.minimum(distance, _FAR) ** 2
    return np.where(np.isinf(distance), 0.0, _beta(freedom / (freedom + square), freedom / 2, 0.5))


def student_quantile(tail: float, freedom: np.ndarray) -> np.ndarray:
    """Returns the distance from zero at which Student's t has the two-sided tail probability `tail`; NaN stays NaN."""
    low, high = np.zeros(np.shape(freedom)), np.full(np.shape(freedom), _FAR)
    # Bisection: the tail probability decreases with the distance.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = student_tail(middle, freedom) > tail
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.where(np.isnan(freedom), np.nan, high)


_FAR: Final = 1e6
# This many halvings shrink the interval from 1e6 to less than 1e-6.
_HALVINGS: Final = 40
_TERMS: Final = 80  # terms of the continued fraction, which converges in about the square root of the larger parameter


def _beta(x: np.ndarray, a: np.ndarray, b: float) -> np.ndarray:
    """Computes the regularized incomplete beta function by its continued fraction (Abramowitz and Stegun, 26.5.8)."""
    a, b_, x = np.broadcast_arrays(a, np.float64(b), x)
    # The fraction converges fast below this x; above it, use I_x(a, b) = 1 - I_{1-x}(b, a).
    flip = x > (a + 1) / (a + b_ + 2)
    one, two, place = np.where(flip, b_, a), np.where(flip, a, b_), np.where(flip, 1 - x, x)
    gamma = np.vectorize(math.lgamma, otypes=[float])
    with np.errstate(divide="ignore", invalid="ignore"):
        front = np.exp(gamma(one + two) - gamma(one) - gamma(two) + one * np.log(place) + two * np.log1p(-place)) / (
            one * _fraction(place, one, two)
        )
    return np.where(flip, 1 - front, front)


def _fraction(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Evaluates 1 + d1 / (1 + d2 / (1 + ...)) backwards."""
    value = np.ones_like(x)
    for term in range(_TERMS, 0, -1):
        half = term // 2
        if term % 2:
            step = -(a + half) * (a + b + half) * x / ((a + term - 1) * (a + term))
        else:
            step = half * (b - half) * x / ((a + term - 1) * (a + term))
        value = 1 + step / value
    return value
