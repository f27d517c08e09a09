"""Detection of repeating layers, which are stacked and scanned."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

__all__ = ["Group", "groups_of"]

Layer = TypeVar("Layer", bound=Hashable)


@dataclass(frozen=True)
class Group(Generic[Layer]):
    """Consecutive layers that repeat.

    Attributes:
      start: index of the first layer in the model.
      period: layers that repeat, in order.
      repeats: number of repetitions of the period.
    """

    start: int
    period: tuple[Layer, ...]
    repeats: int

    def layers(self, place: int) -> range:
        """Returns the indices of the model's layers at one position of the period, in stacking order."""
        step = len(self.period)
        return range(self.start + place, self.start + step * self.repeats, step)


@cache
def groups_of(layers: tuple[Layer, ...]) -> tuple[Group[Layer], ...]:
    """Divides layers into groups with the fewest traced layers, and among these, with the fewest scans.

    For two kinds of layers L and G, LLLLLG LLLLLG LL becomes 2 x LLLLLG and 2 x L.
    """
    # Dynamic programming: best[i] is (traced layers, scans, groups) of layers[i:].
    best: list[tuple[int, int, tuple[Group[Layer], ...]]] = [(0, 0, ())] * (len(layers) + 1)
    for start in reversed(range(len(layers))):
        options = []
        for size in range(1, len(layers) - start + 1):
            period = layers[start : start + size]
            repeats = _repeats(layers, start, period)
            traced, scanned, rest = best[start + size * repeats]
            options.append((traced + size, scanned + 1, (Group(start, period, repeats), *rest)))
        # Compares counts only, since layers cannot be ordered. The first of equal options has the shortest period.
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


def _repeats(layers: Sequence[Layer], start: int, period: Sequence[Layer]) -> int:
    repeats, size = 1, len(period)
    while layers[start + repeats * size : start + (repeats + 1) * size] == period:
        repeats += 1
    return repeats
