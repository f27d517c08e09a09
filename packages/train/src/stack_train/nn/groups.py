"""Layers that repeat: what is stacked and scanned follows from the list of layers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

__all__ = ["Group", "groups_of"]

Layer = TypeVar("Layer", bound=Hashable)


@dataclass(frozen=True)
class Group(Generic[Layer]):
    """The layers of `period`, `repeats` times one after the other; the first is layer `start` of the model."""

    start: int
    period: tuple[Layer, ...]
    repeats: int

    def layers(self, place: int) -> range:
        """The model's layers that stand at one place of the period, in the order in which they are stacked."""
        step = len(self.period)
        return range(self.start + place, self.start + step * self.repeats, step)


@cache
def groups_of(layers: tuple[Layer, ...]) -> tuple[Group[Layer], ...]:
    """Cuts layers into groups so that the fewest layers are traced, and then the fewest groups scanned.

    With L and G for two kinds of layers, LLLLLG LLLLLG LL becomes LLLLLG twice and L twice.
    """
    # best[i] are the groups of layers[i:], with the numbers of layers and of groups that they trace.
    best: list[tuple[int, int, tuple[Group[Layer], ...]]] = [(0, 0, ())] * (len(layers) + 1)
    for start in reversed(range(len(layers))):
        options = []
        for size in range(1, len(layers) - start + 1):
            period = layers[start : start + size]
            repeats = _repeats(layers, start, period)
            traced, scanned, rest = best[start + size * repeats]
            options.append((traced + size, scanned + 1, (Group(start, period, repeats), *rest)))
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


def _repeats(layers: Sequence[Layer], start: int, period: Sequence[Layer]) -> int:
    repeats, size = 1, len(period)
    while layers[start + repeats * size : start + (repeats + 1) * size] == period:
        repeats += 1
    return repeats
