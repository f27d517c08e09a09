"""`stack tune` in a child process, so that an implementation that crashes or hangs does not end the search.

The process writes down what it tries before it does. Where a signal or the time limit ends it, what it tried is
recorded as failed, and another process goes on with the rest.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stack_core.abi.errors import TuningError
from stack_kernels.tuning.tables import Table, own_table_path

__all__ = ["TRYING_VARIABLE", "tune_in_child"]

TRYING_VARIABLE = "STACK_TUNE_TRYING"
"""In the environment of a child: the file in which it writes down what it tries."""
_GRACE_S = 300.0  # what runs when the budget ends is let finish, a long compilation too


def tune_in_child(
    arguments: Sequence[str],
    *,
    budget_s: float,
    again: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None],
    grace_s: float = _GRACE_S,
) -> int:
    """Runs `stack tune ARGUMENTS` in children until one ends by itself; returns its exit status.

    Args:
      budget_s: wall seconds of all children together.
      again: the first one measures what is known, too.
      folder: where the children keep the table.
      say: is called with a line about each child that was ended.
      grace_s: what a child may take beyond the budget.

    Raises:
      TuningError: a child ended while it timed what it had tried before, so that nobody can say what ended it.
    """
    end_s = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory() as name:
        note = Path(name, "trying.json")
        while True:
            left_s = max(end_s - time.monotonic(), 0.0)
            own = [f"--budget-s={left_s}", *(["--again"] if again else [])]
            command = [sys.executable, "-m", "stack_core", "tune", *arguments, *own]
            status = _status(command, {**os.environ, TRYING_VARIABLE: str(note)}, left_s + grace_s)
            if status is not None and status >= 0:
                return status
            how = signal.Signals(-status).name if status else "the time limit"
            say(f"{_record_failure(note, how, folder)}: {how} ended the process; going on without it")
            again = False


def _status(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int | None:
    """How a process ended; None where it was killed at the limit. Ctrl-C reaches it, and is waited for."""
    end_s = time.monotonic() + limit_s
    with subprocess.Popen(command, env=environment) as child:
        while True:
            try:
                return child.wait(max(end_s - time.monotonic(), 0.0))
            except KeyboardInterrupt:
                continue
            except subprocess.TimeoutExpired:
                child.kill()
                return None


def _record_failure(note: Path, how: str, folder: Path | None) -> str:
    """Moves what was tried from the note to the table, as failed; returns its name."""
    if not note.exists():
        raise TuningError(
            f"The process that measured was ended by {how} while it timed what it had tried before. What it had "
            "measured until then is kept; run the command again, and report it if it comes back."
        )
    tried = Table.read(note)
    note.unlink()
    found = [dataclasses.replace(each, reason=f"{how} ended the process") for each in tried.measurements]
    path = own_table_path(tried.chip, folder)
    (Table.read(path) if path.exists() else Table(tried.chip)).merge(found).write(path)
    return ", ".join(each.implementation for each in found)
