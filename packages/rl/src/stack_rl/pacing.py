"""When groups are dispatched, and which of them a batch is made of."""

from dataclasses import dataclass, field

__all__ = ["Pacing"]


@dataclass
class Pacing:
    """Admission of groups whose use may lag up to `max_staleness` versions behind their dispatch.

        dispatch while outstanding < (max_staleness + 1) * groups

    A group that is dispatched at version d is due at d + max_staleness. The batch of version v is made of the groups
    that were complete first, as far as all others can still be used when they are due, `groups` at each version: with
    n_t of the outstanding groups due by t, it holds at least n_t - (t - v) * groups of them, for every t. So a
    straggler is overtaken while there is room for it later, and waited for then; nothing that was dispatched is left
    out, and what batches use has the lengths of what was dispatched.

    Invariant: n_t <= (t - v + 1) * groups for all t >= v, so that a batch has room for what it must hold.

    Source: Fu et al., AReaL, 2025 (arXiv:2505.24298), whose admission has the same limit. Departures: (1) batches hold
    what is due, where AReaL leaves old samples out.

    Attributes:
      groups: in a batch.
      max_staleness: 0 waits for all that were dispatched.
    """

    groups: int
    max_staleness: int
    _versions: dict[int, int] = field(default_factory=dict)  # of what is outstanding, at its dispatch
    _complete: list[int] = field(default_factory=list)  # as they came

    def admitted(self) -> int:
        """How many groups are to be dispatched now."""
        return (self.max_staleness + 1) * self.groups - len(self._versions)

    def dispatch(self, number: int, version: int) -> None:
        self._versions[number] = version

    def complete(self, number: int) -> None:
        self._complete.append(number)

    def ready(self, version: int) -> list[int] | None:
        """The groups of the batch of a version, in the order of their numbers; None if it has to wait."""
        due = {number: dispatched + self.max_staleness for number, dispatched in self._versions.items()}
        chosen: list[int] = []
        for time in sorted(set(due.values())):
            outstanding = sum(each <= time for each in due.values())
            lacking = outstanding - (time - version) * self.groups - sum(due[each] <= time for each in chosen)
            if lacking <= 0:
                continue
            found = [each for each in self._complete if due[each] <= time and each not in chosen]
            if len(found) < lacking:
                return None
            chosen += found[:lacking]
        chosen += [each for each in self._complete if each not in chosen][: self.groups - len(chosen)]
        return sorted(chosen) if len(chosen) == self.groups else None

    def use(self, numbers: list[int]) -> None:
        """Takes the groups of a batch out."""
        for each in numbers:
            del self._versions[each]
        self._complete = [each for each in self._complete if each in self._versions]
