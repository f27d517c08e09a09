"""Child processes that report line by line; a crash, hang or broken device loses nothing already reported."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "ChildResult",
    "kill_group",
    "last_errors",
    "leave_with_parent",
    "parse_message",
    "problem_of",
    "run_child",
    "start_child",
]

_LAST_CHARACTERS = 4000
# The last line of a traceback; later lines often come from atexit handlers and say nothing about the cause.
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Exhausted): \S|stack: error: \S")


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
        return problem_of(self.status, self.errors)


def problem_of(status: int | None, errors: str) -> str | None:
    """Describes the end of a process in one line with the exception that it printed; None for status 0."""
    if status is None:
        return "the time budget ended it"
    if status == 0:
        return None
    cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    last = (raised or lines or [""])[-1]
    return f"{cause}: {last[:300]}" if last else cause


def start_child(
    arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts `python ARGUMENTS` in its own session, with pipes as standard input and output.

    Args:
      arguments: arguments of the interpreter.
      log: file for its standard error.
      environment: extra environment variables.
    """
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, *arguments],
            # `leave_with_parent` waits for its end, which comes if this process ends in any way.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # `kill_group` then reaches the processes that the child starts, too.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


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
    child = start_child(arguments, log=log, environment=environment)
    over = threading.Event()
    # The event is set before the kill ends the loop below, which then reports the deadline.
    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), lambda: (over.set(), kill_group(child)))
    # A timer that waits must not keep the process alive.
    timer.daemon = True
    timer.start()
    with child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                found = parse_message(line)
                if found is not None and on_message is not None:
                    on_message(found)
            status = child.wait()
        finally:
            timer.cancel()
            kill_group(child)
    return ChildResult(None if over.is_set() else status, last_errors(log))


def last_errors(log: Path) -> str:
    """Returns the end of a child's standard error."""
    return log.read_text(errors="replace")[-_LAST_CHARACTERS:]


def kill_group(child: "subprocess.Popen[bytes]") -> None:
    """Kills a child that still runs, with its own children."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def leave_with_parent() -> None:
    """Ends this process when the parent's end of standard input closes, because the parent was killed.

    A child that outlived its parent would disturb the measurements of the next run on the same device.
    """

    def wait() -> None:
        # Not `sys.stdin`: a thread that holds its lock aborts the interpreter's exit.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line of output; None for any other line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
