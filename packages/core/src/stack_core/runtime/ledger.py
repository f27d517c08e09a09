"""Where the time of a run went: every second is given to one activity, so that they sum to its wall time. Pure.

Goodput is what training took of it, without the steps that a failure made it do again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stack_core.events import CheckpointSaved, EvaluationFinished, Event, RunFinished, RunStarted, StepFinished

__all__ = ["ACTIVITIES", "Ledger"]

ACTIVITIES = (
    "training",
    "evaluating",
    "saving",
    "starting agents",
    "forming",
    "done again",
    "ending",
    "finishing",
    "unattended",
)
"""What a run's time goes to.

"forming" is from the fork of the workers to their first step: joining, compiling, reading a checkpoint. "done again"
are steps that a failure lost, and the part of a step that it cut off. "ending" is from a failure's notice until no
worker of the formation is left. "unattended" is the time without a driver.
"""


@dataclass
class Ledger:
    """Seconds by activity.

    Invariant: `sum(seconds.values())` is the time from the first `switch` to the last, whatever was moved between.

    Attributes:
      at_s: when it was last brought up to date, by the clock of the caller.
    """

    at_s: float
    activity: str = "starting agents"
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    _unsaved: list[tuple[int, float]] = field(default_factory=list)
    _step_at_s: float | None = None

    def switch(self, activity: str, now_s: float) -> None:
        """Gives the time since the last call to the activity that ends now."""
        self.seconds[self.activity] += max(0.0, now_s - self.at_s)
        self.at_s = max(now_s, self.at_s)
        self.activity = activity

    def observe(self, event: Event, now_s: float) -> None:
        """Follows a run by its events."""
        match event:
            case RunStarted():
                self.switch("training", now_s)
                self._give_up(after_step=event.first_step)
                self._step_at_s = now_s
            case StepFinished():
                self.switch(self.activity, now_s)
                self._unsaved.append((event.step, event.duration_s))
                self._step_at_s = now_s
            case CheckpointSaved():
                self._unsaved = [(step, spent) for step, spent in self._unsaved if step > event.step]
                self._move(event.blocked_s, "training", "saving")
            case EvaluationFinished():
                self.switch(self.activity, now_s)
                self._move(event.duration_s, "training", "evaluating")
                self._step_at_s = now_s
            case RunFinished():
                self.switch("finishing", now_s)

    def failed(self, now_s: float) -> None:
        """A formation has ended before its work did."""
        self.switch("ending", now_s)
        if self._step_at_s is not None:
            self._move(now_s - self._step_at_s, "training", "done again")
        self._step_at_s = None

    def goodput(self) -> float | None:
        """The share of training in all time; None before any time has passed."""
        total = sum(self.seconds.values())
        return self.seconds["training"] / total if total else None

    def saved(self) -> dict[str, object]:
        """What `restored` takes, as JSON has it."""
        return {"at_s": self.at_s, "seconds": self.seconds, "unsaved": self._unsaved}

    @classmethod
    def restored(cls, saved: Mapping[str, object], now_s: float) -> "Ledger":
        """The ledger of a driver that was killed; the time since it was saved is "unattended"."""
        ledger = cls(float(str(saved["at_s"])), "unattended")
        found = saved["seconds"]
        assert isinstance(found, dict), "as `saved` wrote it"
        ledger.seconds.update(found)
        unsaved = saved["unsaved"]
        assert isinstance(unsaved, list), "as `saved` wrote it"
        ledger._unsaved = [(step, spent) for step, spent in unsaved]
        ledger.switch("forming", now_s)
        return ledger

    def _give_up(self, after_step: int) -> None:
        lost = sum((spent for step, spent in self._unsaved if step > after_step), start=0.0)
        self._unsaved = [(step, spent) for step, spent in self._unsaved if step <= after_step]
        self._move(lost, "training", "done again")

    def _move(self, spent_s: float, source: str, destination: str) -> None:
        moved = min(max(spent_s, 0.0), self.seconds[source])
        self.seconds[source] -= moved
        self.seconds[destination] += moved
