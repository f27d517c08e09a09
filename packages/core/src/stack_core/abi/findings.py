"""Findings of `stack doctor`, which packages add by the hook `stack_register_checks`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["STATUSES", "Check", "Finding", "Status", "worst"]

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


Check = Callable[[Mapping[str, str]], Iterable[Finding]]
"""A check of one package: a function from the environment variables to findings. It must not import JAX."""


def worst(findings: list[Finding]) -> Status:
    """Returns the most serious status among the findings; "ok" for an empty list."""
    return max((finding.status for finding in findings), key=STATUSES.index, default="ok")
