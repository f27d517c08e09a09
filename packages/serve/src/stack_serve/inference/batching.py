"""Which rows to compute next, decided by what each size was measured to cost. Pure: no clock, no threads.

There is no timer: the device takes what waits when it is free, so that batches form under load by themselves.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Call", "Plan", "Waiting", "cheapest", "plan"]


@runtime_checkable
class Waiting(Protocol):
    """Rows that a request still waits for.

    Attributes:
      group: only rows of one group share a call.
      deadline_s: on the clock of `now_s`; after it nobody waits any more.
    """

    @property
    def group(self) -> Hashable: ...
    @property
    def rows(self) -> int: ...
    @property
    def deadline_s(self) -> float | None: ...


@dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
      size: rows that the program computes, some of which may be padding.
      takes: which of the waiting, and how many of its rows, in order.
    """

    group: Hashable
    size: int
    takes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """What to do next.

    Attributes:
      expired: which of the waiting are past their deadlines.
      call: None where nothing is left.
    """

    expired: tuple[int, ...]
    call: Call | None


def plan(waiting: Sequence[Waiting], costs: Mapping[Hashable, Mapping[int, float]], now_s: float) -> Plan:
    """The next call: of the group whose turn it is by age, of the largest size in the cheapest split of its rows.

    Args:
      waiting: oldest first.
      costs: seconds of a call, by group and size.
    """
    expired = [
        number for number, each in enumerate(waiting) if each.deadline_s is not None and each.deadline_s <= now_s
    ]
    late = set(expired)
    alive = [number for number in range(len(waiting)) if number not in late]
    if not alive:
        return Plan(tuple(expired), None)
    group = waiting[alive[0]].group
    queue = [number for number in alive if waiting[number].group == group]
    size = cheapest(sum(waiting[number].rows for number in queue), tuple(sorted(costs[group].items())))[0]
    takes: list[tuple[int, int]] = []
    room = size
    for number in queue:
        rows = min(room, waiting[number].rows)
        takes.append((number, rows))
        room -= rows
        if room == 0:
            break
    return Plan(tuple(expired), Call(group, size, tuple(takes)))


def cheapest(rows: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    """The sizes, largest first, that together hold `rows` at the lowest cost: 9 as 8 + 1, or as 16 where that is less.

    Of what is far beyond the largest size only the beginning is split.

    Args:
      costs: (size, seconds), ascending by size.
    """
    largest = costs[-1][0]
    return _splits(min(rows, 2 * largest), costs)


@functools.lru_cache(maxsize=4096)
def _splits(rows: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for count in range(1, rows + 1):
        options = (
            (cost + best[max(0, count - size)][0], (size, *best[max(0, count - size)][1])) for size, cost in costs
        )
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return tuple(sorted(best[rows][1], reverse=True))
