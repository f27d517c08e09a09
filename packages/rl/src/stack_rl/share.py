"""Division of a run's episodes between its processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stack_core.abi.errors import ConfigError
from stack_core.runtime.processes import ALONE, Processes
from stack_rl.groups import Group, groups_from_bytes, groups_to_bytes

__all__ = ["Share"]


@dataclass(frozen=True)
class Share:
    """The groups that this process plays: process p of P has the groups whose number is p modulo P.

    A group is played in one process, and every process makes its batches from the groups of all.

    Attributes:
      processes: processes of the run.
    """

    processes: Processes = ALONE

    def plays(self, number: int) -> bool:
        return number % self.processes.count == self.processes.id

    def select(self, groups: Iterable[Group]) -> list[Group]:
        return [each for each in groups if self.plays(each.number)]

    def rows(self, episodes: int) -> int:
        """Returns the maximum number of episodes that a process plays at once, of `episodes` in all processes."""
        return -(-episodes // self.processes.count)

    def groups_ahead(self, groups: int) -> int:
        """Returns the number of groups that each process contributes to a batch that is sampled ahead.

        Raises:
          ConfigError: the processes do not divide the groups.
        """
        count = self.processes.count
        if groups % count:
            raise ConfigError(
                f"data.groups is {groups}, which the {count} processes of the run do not divide. With "
                f"data.max_staleness, each process contributes equally many groups: set data.groups to a multiple of "
                f"{count}."
            )
        return groups // count

    def gather(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups of all processes, sorted by number; a collective, like all methods below.

        Args:
          groups: groups of this process.
        """
        if self.processes.count == 1:
            return list(groups)
        messages = self.processes.bytes_from_each("groups", groups_to_bytes(groups))
        found = [group for message in messages for group in groups_from_bytes(message)]
        return sorted(found, key=lambda each: each.number)

    def agree(self, label: str, value: bool) -> bool:
        """Returns whether the value is true in all processes."""
        return all(self.processes.from_each(label, value))
