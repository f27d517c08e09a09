"""Where the wall time of a run's session went: every second is given to one activity. Pure: callers bring the clock.

Goodput is the share of training in all of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["ACTIVITIES", "Goodput", "goodput", "sum_of_sessions"]

ACTIVITIES = ("starting", "compiling", "training", "waiting for data", "evaluating", "saving", "ending")
"""What the time of a session goes to.

"starting" is all before the first step but compiling: reading data, tracing, a checkpoint. "waiting for data" is when
the devices had nothing left to do. "saving" is what training was blocked for. "ending" is after the last step.
"""


@dataclass
class Goodput:
    """Seconds by activity.

    Invariant: `sum(seconds.values())` is the time from the beginning to the last `switch`, whatever was moved between.

    Attributes:
      at_s: when it was last brought up to date, by the caller's clock; at first, when the session began.
      activity: what goes on since then.
    """

    at_s: float
    activity: str = "starting"
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))

    def switch(self, activity: str, now_s: float) -> None:
        """Gives the time since the last call to the activity that ends now; another begins."""
        self.seconds[self.activity] += max(0.0, now_s - self.at_s)
        self.at_s = max(now_s, self.at_s)
        self.activity = activity

    def move(self, spent_s: float, source: str, destination: str) -> None:
        """Gives time of one activity to another that went on inside it; no more than there is."""
        moved = min(max(spent_s, 0.0), self.seconds[source])
        self.seconds[source] -= moved
        self.seconds[destination] += moved


def goodput(seconds: Mapping[str, float]) -> float | None:
    """The share of training in all time; None before any time has passed."""
    total = sum(seconds.values())
    return seconds.get("training", 0.0) / total if total else None


def sum_of_sessions(sessions: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by activity of a run that went on in several sessions."""
    total = dict.fromkeys(ACTIVITIES, 0.0)
    for seconds in sessions:
        for activity, spent_s in seconds.items():
            total[activity] = total.get(activity, 0.0) + spent_s
    return total
