"""`stack tune` in a child process, which protects the search from crashes and hangs of implementations.

The child records each candidate before the attempt. If a signal or the time limit ends the child, that candidate is
recorded as failed and another child continues with the rest.
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
from stack_kernels.tuning.tables import Table, local_table_path

__all__ = ["TRYING_VARIABLE", "record_failure", "tune_in_child"]

TRYING_VARIABLE = "STACK_TUNE_TRYING"
"""Environment variable of the child: the file in which it records the current candidate."""
_GRACE_S = 300.0  # work in flight when the budget ends may finish, including a long compilation


def tune_in_child(
    arguments: Sequence[str],
    *,
    budget_s: float,
    again: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None],
    grace_s: float = _GRACE_S,
) -> int:
    """Runs `stack tune ARGUMENTS` in child processes until a child exits normally; returns its exit status.

    Args:
      arguments: arguments of the command.
      budget_s: wall seconds of all children together, without those spent on candidates that ended a child.
      again: the first child repeats known measurements.
      folder: folder in which the children store the table.
      say: called with one line about each child that was killed.
      grace_s: extra seconds that a child may take beyond the budget.

    Raises:
      TuningError: a child died while timing candidates that had already run, so the cause is unknown.
    """
    end_s = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory() as directory:
        note = Path(directory, "trying.json")
        while True:
            left_s = max(end_s - time.monotonic(), 0.0)
            options = [f"--budget-s={left_s}", *(["--again"] if again else [])]
            command = [sys.executable, "-m", "stack_core", "tune", *arguments, *options]
            status = _status(command, {**os.environ, TRYING_VARIABLE: str(note)}, left_s + grace_s)
            if status is not None and status >= 0:
                return status
            cause = signal.Signals(-status).name if status else "the time limit"
            name, spent_s = record_failure(note, f"{cause} ended the process", folder=folder)
            say(f"{name}: {cause} ended the process; going on without it")
            # A candidate that hangs until the limit would leave nothing for the others.
            end_s += spent_s
            # The next child continues, and need not repeat what this one measured.
            again = False


def _status(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int | None:
    """Runs a process and returns its exit status; None if it was killed at the limit.

    On Ctrl-C it waits for the child, which receives the signal too.
    """
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


def record_failure(
    note: Path, reason: str, table: Path | None = None, *, folder: Path | None = None
) -> tuple[str, float]:
    """Moves the candidate in the note to the table, as failed; returns its name and the seconds spent on it.

    Args:
      note: file that the process wrote before it tried the candidate.
      reason: reason of the failure.
      table: file of the table; by default the file of the chip in `folder`.
      folder: folder in which the children store the table.

    Raises:
      TuningError: the process had tried its candidates before and was timing them.
    """
    if not note.exists():
        raise TuningError(
            f"The process that measured died ({reason}) while it timed what it had tried before. What it had "
            "measured until then is kept; run the command again, and report it if it comes back."
        )
    tried = Table.read(note)
    spent_s = max(time.time() - note.stat().st_mtime, 0.0)
    # The death of the next child must not be put down to this candidate.
    note.unlink()
    found = [dataclasses.replace(each, reason=reason) for each in tried.measurements]
    path = table or local_table_path(tried.chip, folder)
    # From the table the next child learns which candidate to leave out.
    (Table.read(path) if path.exists() else Table(tried.chip)).merge(found).write(path)
    return ", ".join(each.implementation for each in found), spent_s
