"""`stack report`: rewrites the report of a run."""

import sys
from pathlib import Path

from stack_core.abi.run_directory import RunDirectory
from stack_train.panels.run_report import write_report

__all__ = ["report"]


def report(run: Path, /) -> None:
    """Rewrite the report of a run, RUN/report.html, from the files in its directory.

    The page needs no network. A run writes it at evaluations and at its end.

    Args:
      run: the run's directory.
    """
    from stack_train.run.config import saved_config  # imports JAX

    for failure in write_report(run, saved_config(RunDirectory(run))):
        print(f"stack: a panel of the report failed: {failure}", file=sys.stderr)
    print(f"stack: the report is {str(run / 'report.html')!r}.", file=sys.stderr)
