"""`stack profile diff`: changes between captures."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stack_profile.answer import Answer, share_of
from stack_profile.commands.printing import Limit, PrintCsv, PrintJson, TracePath, check_formats, show
from stack_profile.comparisons.comparison import DiffGrouping
from stack_profile.comparisons.diff import MIN_CHANGE
from stack_profile.comparisons.diff import diff as difference
from stack_profile.exports import write
from stack_profile.report.diff_page import diff_page
from stack_profile.traces.trace import Trace, load_trace

__all__ = ["More", "diff", "write_report"]

More = Annotated[tuple[Path, ...], Parameter(negative=(), consume_multiple=True)]


def diff(  # noqa: PLR0913, each parameter is an option of the command
    before: TracePath,
    after: TracePath,
    /,
    *,
    a: More = (),
    b: More = (),
    by: DiffGrouping = "op",
    min_change: str = f"{MIN_CHANGE:.0%}",
    limit: Limit = 20,
    json: PrintJson = False,
    csv: PrintCsv = False,
    report: Path | None = None,
) -> None:
    """Rank what changed between captures: stack profile diff BEFORE AFTER --a BEFORE2 BEFORE3 --b AFTER2 AFTER3

    Rows are labelled slower or faster if the change is significant over the repeated steps. With several captures per
    side, taken alternately, the test also covers variation between captures.

    Args:
      a: more captures of the program before.
      b: more captures of the program after.
      by: grouping of the rows: operation, Python line, layer, module or category of work.
      min_change: minimum change of a labelled row, as a share of its time before.
      report: file for an HTML page with the changes by line, operation, layer, module and category, and both timelines.
    """
    check_formats(json=json, csv=csv)
    sides = [[load_trace(path) for path in (first, *more)] for first, more in ((before, a), (after, b))]
    least = share_of(min_change)
    show(difference(*sides, by=by, min_change=least), limit=limit, json=json, csv=csv)
    if report is not None:
        write_report(report, *sides, min_change=least)


def write_report(
    file: Path,
    before: Sequence[Trace],
    after: Sequence[Trace],
    *,
    gate: Answer[Any] | None = None,
    min_change: float = MIN_CHANGE,
) -> None:
    """Writes the HTML page of a comparison, and prints its path to standard error."""
    write([diff_page(before, after, gate=gate, min_change=min_change)], file)
    print(f"stack: the report is {str(file)!r}.", file=sys.stderr)
