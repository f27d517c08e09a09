"""`goodput.jsonl` in the run directory: wall time of each session by activity."""

import contextlib
import json
import time
from pathlib import Path
from typing import Final

from stack_core.abi.event_bus import ObserverContext
from stack_core.abi.events import Event, RunFailed, RunFinished, RunStarted
from stack_core.runtime.goodput import Goodput

__all__ = ["GoodputObserver", "goodput_observer"]


def goodput_observer(context: ObserverContext) -> "GoodputObserver":
    """Builds the goodput observer of a run."""
    return GoodputObserver(context.directory / "goodput.jsonl")


class GoodputObserver:
    """Appends `{"seconds": {activity: ...}}` when a session ends. A killed session leaves no line.

    The line is written before the report, and rewritten after all observers are closed and the run is freed.
    """

    in_loop: Final = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._account: Goodput | None = None
        self._written_at: int | None = None

    def observe(self, event: Event) -> None:
        now_s = time.perf_counter()
        if isinstance(event, RunStarted):
            self._account = Goodput(now_s - event.setup_s)
        if self._account is None:
            return
        self._account.observe(event, now_s)
        if isinstance(event, RunFinished | RunFailed):
            self._write(self._account)

    def close(self) -> None:
        if self._account is not None:
            self._write(self._account)

    def finish(self) -> None:
        """Gives the time since `close` to "finishing"; on a disk that is full, the line of `close` stays."""
        if self._account is not None:
            with contextlib.suppress(OSError):
                self._write(self._account)
            self._account = None

    def _write(self, account: Goodput) -> None:
        """Writes the session's line, replacing its previous version."""
        account.switch("finishing", time.perf_counter())
        with self._path.open("a+b") as file:
            self._written_at = file.tell() if self._written_at is None else self._written_at
            file.truncate(self._written_at)
            file.write((json.dumps({"seconds": account.seconds}) + "\n").encode())
