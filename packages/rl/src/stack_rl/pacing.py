"""Scheduling of groups for dispatch and use."""

from dataclasses import dataclass, field

__all__ = ["Pacing"]


@dataclass
class Pacing:
    """Admission of groups whose use may lag up to `max_staleness` batches behind their dispatch.

        dispatch while outstanding < (max_staleness + 1) * groups

    A group dispatched before batch d is due in batch d + max_staleness. Batch v takes the groups that completed first,
    provided that all other outstanding groups still fit into later batches before they are due, with `groups` per
    batch. With n_t outstanding groups due by t, the batch must contain at least n_t - (t - v) * groups of them,
    for every t. A straggler is therefore overtaken while later batches have room for it, and waited for afterwards.
    Every dispatched group is used, so batches have the same length distribution as the dispatched groups.

    Invariant: n_t <= (t - v + 1) * groups for all t >= v, so a batch has room for all groups that it must contain.

    Source: Fu et al., AReaL, 2025 (arXiv:2505.24298), whose admission has the same limit. Departures: (1) batches
    contain the groups that are due, where AReaL drops old samples.

    Attributes:
      groups: number of groups per batch.
      max_staleness: maximum lag in batches; 0 waits for all dispatched groups.
    """

    groups: int
    max_staleness: int
    _batches: dict[int, int] = field(default_factory=dict)  # batch at dispatch of each outstanding group
    _complete: list[int] = field(default_factory=list)  # in order of completion

    def admitted(self) -> int:
        """Returns the number of groups to dispatch now."""
        return (self.max_staleness + 1) * self.groups - len(self._batches)

    def dispatch(self, number: int, batch: int) -> None:
        self._batches[number] = batch

    def complete(self, number: int) -> None:
        self._complete.append(number)

    def ready(self, batch: int) -> list[int] | None:
        """Returns the sorted group numbers of a batch; None if the batch has to wait."""
        due = {number: dispatched + self.max_staleness for number, dispatched in self._batches.items()}
        chosen: list[int] = []
        for time in sorted(set(due.values())):
            outstanding = sum(each <= time for each in due.values())
            # Groups due by `time` that do not fit into the batches after this one, minus the groups already chosen.
            lacking = outstanding - (time - batch) * self.groups - sum(due[each] <= time for each in chosen)
            if lacking <= 0:
                continue
            found = [each for each in self._complete if due[each] <= time and each not in chosen]
            if len(found) < lacking:
                return None
            chosen += found[:lacking]
        chosen += [each for each in self._complete if each not in chosen][: self.groups - len(chosen)]
        return sorted(chosen) if len(chosen) == self.groups else None

    def use(self, numbers: list[int]) -> None:
        """Removes the groups of a batch."""
        for each in numbers:
            del self._batches[each]
        self._complete = [each for each in self._complete if each in self._batches]
