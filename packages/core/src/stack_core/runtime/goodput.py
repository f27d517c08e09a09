"""Accounting of a run's wall time: every second belongs to one activity (pure: callers pass the clock).

Goodput is the fraction of time spent on training, without steps that were repeated after a failure.
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
"""The activities of a run.

- "starting": before the first step, except compilation: reading data, tracing, restoring a checkpoint. A run over
  several hosts has "starting agents" instead, and then "forming" after the workers are forked.
- "waiting for data": the devices are idle because the next batch is not ready.
- "saving": training is blocked by a checkpoint.
- "done again": steps lost in a failure, including the interrupted part of a step.
- "ending": from the detection of a failure until no worker of the formation is left. A run with a range of hosts is in
  "starting agents" again while it waits for missing hosts.
- "finishing": after the last step.
- "unattended": without a driver.
"""


@dataclass
class Goodput:
    """Seconds by activity; activities that never occurred are absent.

    Invariant: `sum(seconds.values())` is the time from the beginning to the last `switch`, regardless of calls of
    `move`.

    Attributes:
      at_s: time of the last update by the caller's clock; initially the start of the run or its session.
      activity: current activity, since `at_s`.
      seconds: accumulated seconds by activity.
    """

    at_s: float
    activity: str = "starting"
    seconds: dict[str, float] = field(default_factory=dict)
    _unsaved: list[tuple[int, float]] = field(default_factory=list)
    _step_at_s: float | None = None

    def switch(self, activity: str, now_s: float) -> None:
        """Adds the time since the last call to the current activity and begins another."""
        self._add(self.activity, max(0.0, now_s - self.at_s))
        self.at_s = max(now_s, self.at_s)
        self.activity = activity

    def move(self, spent_s: float, source: str, destination: str) -> None:
        """Moves time from one activity to another that happened during it; at most the available time."""
        moved = min(max(spent_s, 0.0), self.seconds.get(source, 0.0))
        if moved:
            self._add(source, -moved)
            self._add(destination, moved)

    def observe(self, event: Event, now_s: float) -> None:
        """Updates the account with an event of the run."""
        match event:
            case RunStarted():
                before = self.activity
                self.switch("training", now_s)
                self.move(event.compile_s, before, "compiling")
                # Steps after the restored checkpoint run again.
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
                # A failure can no longer undo steps up to the checkpoint.
                self._unsaved = [(step, spent_s) for step, spent_s in self._unsaved if step > event.step]
            case EvaluationFinished():
                self.switch(self.activity, now_s)
                self.move(event.duration_s, "training", "evaluating")
                self._step_at_s = now_s
            case RunFinished():
                self.switch("finishing", now_s)

    def failed(self, now_s: float) -> None:
        """Begins the activity "ending" when a formation failed, or is ended for one with more hosts."""
        self.switch("ending", now_s)
        if self._step_at_s is not None:
            self.move(now_s - self._step_at_s, "training", "done again")
        self._step_at_s = None

    def saved(self) -> dict[str, Any]:
        """Returns the state for `restored`, JSON values."""
        return {"at_s": self.at_s, "seconds": self.seconds, "unsaved": self._unsaved}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], now_s: float) -> "Goodput":
        """Restores the account of a killed driver; the time since it was saved counts as "unattended"."""
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
    """Returns the goodput for seconds by activity; None before any time has passed."""
    total_s = sum(seconds.values())
    return seconds.get("training", 0.0) / total_s if total_s else None


def sum_of_sessions(sessions: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Adds up the seconds by activity of several sessions of a run, in the order of `ACTIVITIES`."""
    total: dict[str, float] = {}
    for seconds in sessions:
        for activity, spent_s in seconds.items():
            total[activity] = total.get(activity, 0.0) + spent_s
    return {activity: total[activity] for activity in (*ACTIVITIES, *total) if activity in total}
