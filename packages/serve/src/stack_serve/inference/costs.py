"""Measured costs of calls by size. Pure: no clock.

A measurement can only be too high, if another thread or process used the processor. So the minimum of several
measurements counts, a size never costs more than a larger one, and a high cost expires: otherwise a size that is
not chosen because of a wrong measurement would never be measured again.
"""

from collections import deque
from collections.abc import Iterable, Mapping

__all__ = ["Costs"]

# A single slow call is noise: a cost rises only if five in a row took 1.5 times as long, and for a second.
_WINDOW = 5
_DRIFT = 1.5
_TRUST_S = 1.0


class Costs:
    """The costs of the sizes of one group, in seconds a call.

    Args:
      measured: several measurements of each size.
    """

    def __init__(self, measured: Mapping[int, Iterable[float]]) -> None:
        self._least = {size: min(seconds) for size, seconds in measured.items()}
        self._raised: dict[int, tuple[float, float]] = {}
        self._recent: dict[int, deque[float]] = {size: deque(maxlen=_WINDOW) for size in self._least}
        self._current = self._ascending()

    def at(self, now_s: float) -> Mapping[int, float]:
        """Seconds by size, ascending; the same object until something changes."""
        if any(until_s <= now_s for _, until_s in self._raised.values()):
            self._raised = {size: each for size, each in self._raised.items() if each[1] > now_s}
            self._current = self._ascending()
        return self._current

    def note(self, size: int, took_s: float, now_s: float) -> None:
        """Counts a call. A cost rises where all of the last few calls took far longer."""
        recent = self._recent[size]
        recent.append(took_s)
        known_s, least_s = self._believed(size), min(recent)
        if took_s * _DRIFT < self._least[size]:
            self._least[size] = took_s
        if least_s < self._least[size] * _DRIFT or len(recent) < _WINDOW:
            self._raised.pop(size, None)
        else:
            # Small changes keep the old cost, for which splits are cached.
            raised_s = known_s if known_s / _DRIFT < least_s < known_s * _DRIFT else least_s
            self._raised[size] = (raised_s, now_s + _TRUST_S)
        if self._believed(size) != known_s:
            self._current = self._ascending()

    def _believed(self, size: int) -> float:
        return self._raised[size][0] if size in self._raised else self._least[size]

    def _ascending(self) -> Mapping[int, float]:
        """Returns the estimated cost of each size, at most the cost of the next larger size."""
        costs: dict[int, float] = {}
        larger_s = float("inf")
        for size in sorted(self._least, reverse=True):
            larger_s = min(larger_s, self._believed(size))
            costs[size] = larger_s
        return dict(reversed(costs.items()))
