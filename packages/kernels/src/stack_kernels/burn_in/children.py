"""Child processes that report line by line; a crash, hang or broken device loses nothing already reported."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ChildResult", "run_child"]

_LAST_CHARACTERS = 2000


@dataclass(frozen=True)
class ChildResult:
    """Result of a child process.

    Attributes:
      status: exit status, negative for a signal; None if it was killed at the deadline.
      errors: end of its standard error.
    """

    status: int | None
    errors: str

    @property
    def problem(self) -> str | None:
        """A one-line description of the failure; None if there was no failure."""
        if self.status is None:
            return "the time budget ended it"
        if self.status == 0:
            return None
        cause = signal.Signals(-self.status).name if self.status < 0 else f"exit status {self.status}"
        last = next((line.strip() for line in reversed(self.errors.splitlines()) if line.strip()), "")
        return f"{cause}: {last[:300]}" if last else cause


def run_child(
    arguments: Sequence[str],
    deadline_s: float,
    *,
    log: Path,
    on_message: Callable[[dict[str, Any]], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ChildResult:
    """Runs `python ARGUMENTS` in its own session until it exits, or until `deadline_s` of `time.monotonic`.

    Args:
      arguments: arguments of the interpreter.
      deadline_s: time at which the child is killed.
      log: file for its standard error.
      on_message: called with each line of its standard output that is a JSON object; other lines are ignored.
      environment: extra environment variables.
    """
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # `_kill` then reaches the processes that the child starts, too.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    over = threading.Event()
    # The event is set before the kill ends the loop below, which then reports the deadline.
    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), lambda: (over.set(), _kill(child)))
    # A timer that waits must not keep the process alive.
    timer.daemon = True
    timer.start()
    with child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                found = _object(line)
                if found is not None and on_message is not None:
                    on_message(found)
            status = child.wait()
        finally:
            timer.cancel()
            _kill(child)
    errors_text = log.read_text(errors="replace")[-_LAST_CHARACTERS:]
    return ChildResult(None if over.is_set() else status, errors_text)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
