"""The panel `goodput`: wall time of all sessions by activity."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.reports import Fragment
from stack_core.report.document import key_values
from stack_core.report.markup import element
from stack_core.runtime.goodput import share_of_training, sum_of_sessions
from stack_train.panels.records import records

__all__ = ["goodput"]


def goodput(directory: Path, config: Mapping[str, Any]) -> Fragment | None:
    """Sums the time of all sessions in `goodput.jsonl` by activity; returns None before the first session ends."""
    del config
    sessions = [record["seconds"] for record in records(directory / "goodput.jsonl") if "seconds" in record]
    seconds = sum_of_sessions(sessions)
    share, total = share_of_training(seconds), sum(seconds.values())
    if share is None:
        return None
    shown = {activity: f"{spent_s:,.1f} s, {spent_s / total:.1%}" for activity, spent_s in seconds.items() if spent_s}
    ended = "one session" if len(sessions) == 1 else f"{len(sessions)} sessions"
    said = f"{share:.1%} of {total:,.1f} s was training, in {ended} whose end is recorded."
    return Fragment("goodput", element("div", element("p", said), key_values(shown)))
