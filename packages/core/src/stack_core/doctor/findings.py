"""The findings of `stack doctor`, one per check."""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["STATUSES", "Finding", "Status", "worst"]

Status = Literal["ok", "note", "warning", "problem"]

STATUSES: Final[tuple[Status, ...]] = ("ok", "note", "warning", "problem")
"""In increasing severity: correct; a setting that changes results or speed; works, but badly; does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      check: subject: "jax", "memory", or the name of an environment variable.
      status: severity.
      found: observation, in one or two sentences.
      advice: suggested fix; empty if nothing needs to be done.
    """

    check: str
    status: Status
    found: str
    advice: str = ""


def worst(findings: list[Finding]) -> Status:
    """Returns the most serious status among the findings; "ok" for an empty list."""
    return max((finding.status for finding in findings), key=STATUSES.index, default="ok")
