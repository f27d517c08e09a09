"""Where the wall time of a run went: every second is given to one activity. Pure: callers bring the clock.

Goodput is the share of training in all of it, without the steps that a failure made it do again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stack_core.abi.events import CheckpointSaved, EvaluationFinished, Event, RunFinished, RunStarted, StepFinished

__all__ = ["ACTIVITIES", "Goodput", "share_of_training", "sum_of_sessions"]

ACTIVITIES = (
    "starting",
    "starting agents",
    "forming",
    "compiling",
    "training",
    "waiting for data",
    "evaluating",
    "saving",
    "done again",
    "ending",
    "finishing",
    "unattended",
)
"""What a run's time goes to.

"starting" is all before the first step but compiling: reading data, tracing, a checkpoint; over several hosts it is
"starting agents" and then "forming", from the fork of the workers on. "waiting for data" is when the devices had
nothing left to do. "saving" is what training was blocked for. "done again" are steps that a failure lost, and the part
of a step that it cut off. "ending" is from a failure's notice until no worker of the formation is left, "finishing" is
after the last step, and "unattended" is the time without a driver.
"""


@dataclass
class Goodput:
    """Seconds by activity; an activity that never was is left out.

    Invariant: `sum(seconds.values())` is the time from the beginning to the last `switch`, whatever was moved between.

    Attributes:
      at_s: when it was last brought up to date, by the caller's clock; at first, when the run or its session began.
      activity: what goes on since then.
    """

    at_s: float
    activity: str = "starting"
    seconds: dict[str, float] = field(default_factory=dict)
    _unsaved: list[tuple[int, float]] = field(default_factory=list)
    _step_at_s: float | None = None

    def switch(self, activity: str, now_s: float) -> None:
        """Gives the time since the last call to the activity that ends now; another begins."""
        self._add(self.activity, max(0.0, now_s - self.at_s))
        self.at_s = max(now_s, self.at_s)
        self.activity = activity

    def move(self, spent_s: float, source: str, destination: str) -> None:
        """Gives time of one activity to another that went on inside it; no more than there is."""
        moved = min(max(spent_s, 0.0), self.seconds.get(source, 0.0))
        if moved:
            self._add(source, -moved)
            self._add(destination, moved)

    def observe(self, event: Event, now_s: float) -> None:
        """Follows a run by its events."""
        match event:
            case RunStarted():
                before = self.activity
                self.switch("training", now_s)
                self.move(event.compile_s, before, "compiling")
                self._give_up(after_step=event.first_step)
                self._step_at_s = now_s
            case StepFinished():
                self.switch(self.activity, now_s)
                self.move(event.data_wait_s, "training", "waiting for data")
                self._unsaved.append((event.step, event.duration_s - event.data_wait_s))
                self._step_at_s = now_s
            case CheckpointSaved():
                self.switch(self.activity, now_s)
                self.move(event.blocked_s, "training", "saving")
                self._unsaved = [(step, spent_s) for step, spent_s in self._unsaved if step > event.step]
            case EvaluationFinished():
                self.switch(self.activity, now_s)
                self.move(event.duration_s, "training", "evaluating")
                self._step_at_s = now_s
            case RunFinished():
                self.switch("finishing", now_s)

    def failed(self, now_s: float) -> None:
        """A formation has ended before its work did."""
        self.switch("ending", now_s)
        if self._step_at_s is not None:
            self.move(now_s - self._step_at_s, "training", "done again")
        self._step_at_s = None

    def saved(self) -> dict[str, Any]:
        """What `restored` takes, as JSON has it."""
        return {"at_s": self.at_s, "seconds": self.seconds, "unsaved": self._unsaved}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], now_s: float) -> "Goodput":
        """That of a driver that was killed; the time since it was saved is "unattended"."""
        unsaved = [(step, spent_s) for step, spent_s in saved["unsaved"]]
        account = cls(saved["at_s"], "unattended", dict(saved["seconds"]), unsaved)
        account.switch("forming", now_s)
        return account

    def _give_up(self, after_step: int) -> None:
        lost_s = sum((spent_s for step, spent_s in self._unsaved if step > after_step), start=0.0)
        self._unsaved = [(step, spent_s) for step, spent_s in self._unsaved if step <= after_step]
        self.move(lost_s, "training", "done again")

    def _add(self, activity: str, spent_s: float) -> None:
        self.seconds[activity] = self.seconds.get(activity, 0.0) + spent_s


def share_of_training(seconds: Mapping[str, float]) -> float | None:
    """Goodput of seconds by activity; None before any time has passed."""
    total_s = sum(seconds.values())
    return seconds.get("training", 0.0) / total_s if total_s else None


def sum_of_sessions(sessions: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by activity of a run that went on in several sessions, in the order of `ACTIVITIES`."""
    total: dict[str, float] = {}
    for seconds in sessions:
        for activity, spent_s in seconds.items():
            total[activity] = total.get(activity, 0.0) + spent_s
    return {activity: total[activity] for activity in (*ACTIVITIES, *total) if activity in total}
