"""The numbers of hosts with which a run may continue, such as 2..4 (pure)."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from stack_core.abi.errors import ConfigError

__all__ = ["HostRange"]

_FORM = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")


@dataclass(frozen=True)
class HostRange:
    """A range of numbers of hosts. A fixed number is a range of one.

    Invariant: `1 <= minimum <= maximum`.

    Attributes:
      minimum: smallest number of hosts with which the run continues.
      maximum: number of hosts that the run requests.
    """

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, value: object, field: str = "cluster.hosts") -> "HostRange":
        """Parses a number, such as 4, or a range, such as "2..4".

        Args:
          field: name of the setting, for messages.

        Raises:
          ConfigError: the value has another form, or the range is empty or includes 0.
        """
        match = _FORM.fullmatch(str(value))
        if match is None:
            raise ConfigError(
                f"{field} is {value!r}; expected a number of hosts, such as 4, or a range, such as 2..4, of which both "
                "ends are included."
            )
        minimum, maximum = int(match[1]), int(match[2] or match[1])
        if not 1 <= minimum <= maximum:
            raise ConfigError(
                f"{field} is {value!r}; expected at least 1 host, and a range from the smaller number to the larger "
                "one, such as 2..4."
            )
        return cls(minimum, maximum)

    def __str__(self) -> str:
        return str(self.minimum) if self.is_fixed else f"{self.minimum}..{self.maximum}"

    @property
    def is_fixed(self) -> bool:
        return self.minimum == self.maximum

    def choose(self, connected: int, unfit: Collection[int] = ()) -> int | None:
        """Returns the largest number of the range for which enough hosts are connected, or None.

        Args:
          unfit: numbers that do not divide the run; they are not chosen.
        """
        numbers = range(min(connected, self.maximum), self.minimum - 1, -1)
        return next((number for number in numbers if number not in unfit), None)
