"""The decision after a formation's end: another formation, or the end of the run with the evidence (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from stack_core.runtime.attribution import Failure

__all__ = ["GiveUp", "Restart", "after"]

_SAME_PLACE = {"error": 2, "exit": 2, "signal": 2, "hang": 2}
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
_KILLS_AT_ONE_PLACE = 4


@dataclass(frozen=True)
class Restart:
    """The decision to form again, from the last checkpoint."""


@dataclass(frozen=True)
class GiveUp:
    """The decision to end the run, because another formation would fail as well.

    Attributes:
      reason: the evidence.
    """

    reason: str


def after(failures: Sequence[Failure], *, max_failures: int) -> Restart | GiveUp:
    """Decides what follows the last of a run's failures.

    - An error that the user must fix ends the run.
    - A step that fails twice in a row at the same place, by the same rank and in the same way, is considered
      deterministic, and ends the run. Signals from outside (such as SIGKILL when the kernel is out of memory) may hit
      twice by chance; for them the limit is four.
    - More than `max_failures` failures in a row without a completed step between them end the run.
    """
    last = failures[-1]
    if last.mendable:
        return GiveUp(str(last))
    alike = 0
    for failure in reversed(failures):
        if failure.place != last.place:
            break
        alike += 1
    limit = _KILLS_AT_ONE_PLACE if last.signal in _FROM_OUTSIDE else _SAME_PLACE.get(last.kind, max_failures + 1)
    if alike >= limit and last.step is not None:
        return GiveUp(f"It failed {alike} times in a row at the same place, {last}.")
    stuck = 0
    for failure in reversed(failures):
        if failure.step != last.step:
            break
        stuck += 1
    if stuck > max_failures:
        listing = "".join(f"\n  {failure}" for failure in failures[-stuck:])
        return GiveUp(f"It failed {stuck} times in a row without completing a step:{listing}")
    return Restart()
