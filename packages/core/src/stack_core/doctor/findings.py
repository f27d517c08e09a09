"""What the doctor says: one finding for each thing it looked at."""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["STATUSES", "Finding", "Status", "worst"]

Status = Literal["ok", "note", "warning", "problem"]

STATUSES: Final[tuple[Status, ...]] = ("ok", "note", "warning", "problem")
"""As it should be; changes results or speed, perhaps on purpose; works, but badly; does not work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      check: what it is: "jax", "memory", the name of an environment variable.
      found: what was there, in a sentence or two.
      advice: what to do about it; empty where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    advice: str = ""


def worst(findings: list[Finding]) -> Status:
    """The most serious status among the findings; "ok" where there are none."""
    return max((finding.status for finding in findings), key=STATUSES.index, default="ok")
