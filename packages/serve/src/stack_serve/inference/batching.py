"""Dynamic batching from the measured cost of each batch size. Pure: no clock, no threads.

There is no timer. A free device takes the rows in the queue, and larger batches form under load.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Call", "Plan", "Waiting", "cheapest", "plan"]


@runtime_checkable
class Waiting(Protocol):
    """A queued request.

    Attributes:
      group: key of its group. Only rows of the same group share a call.
      rows: number of rows still to compute.
      deadline_s: time on the clock of `now_s` at which the request expires. None sets no deadline.
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
      group: group of all rows of the call.
      size: number of rows that the program computes, including padding.
      takes: (index of the request in the queue, number of its rows), in queue order.
    """

    group: Hashable
    size: int
    takes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """The next step for a queue.

    Attributes:
      expired: indices of the requests whose deadlines have passed.
      call: next call, or None if no request remains.
    """

    expired: tuple[int, ...]
    call: Call | None


def plan(waiting: Sequence[Waiting], costs: Mapping[Hashable, Mapping[int, float]], now_s: float) -> Plan:
    """Plans the next call, for the group of the oldest request.

    The call has the largest size in the cheapest split of the group's rows.

    Args:
      waiting: queued requests, oldest first.
      costs: seconds per call, by group and size.
      now_s: current time. Requests whose deadlines are not later expire.
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
    """Returns the cheapest sizes that fit `rows`, largest first: 9 as 8 + 1, or as 16 if that costs less.

    At most twice the largest size is split, and further rows are ignored.

    Args:
      rows: number of rows to compute.
      costs: (size, seconds) pairs, ascending by size.
    """
    largest = costs[-1][0]
    return _splits(min(rows, 2 * largest), costs)


# Every call needs a split, but costs change rarely.
@functools.lru_cache(maxsize=4096)
def _splits(rows: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for count in range(1, rows + 1):
        # A size above the remaining rows is padded, so the rest before it is empty.
        options = (
            (cost + best[max(0, count - size)][0], (size, *best[max(0, count - size)][1])) for size, cost in costs
        )
        # Fewer calls win among equal costs.
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return tuple(sorted(best[rows][1], reverse=True))
