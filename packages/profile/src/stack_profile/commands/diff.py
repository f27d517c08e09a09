"""`stack profile diff`: changes between captures."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_profile.answer import share_of
from stack_profile.commands.printing import Limit, PrintCsv, PrintJson, TracePath, show
from stack_profile.comparisons.comparison import DiffGrouping
from stack_profile.comparisons.diff import diff as difference
from stack_profile.traces.trace import load_trace

__all__ = ["More", "diff"]

More = Annotated[tuple[Path, ...], Parameter(negative=(), consume_multiple=True)]


def diff(  # noqa: PLR0913, each parameter is an option of the command
    before: TracePath,
    after: TracePath,
    /,
    *,
    a: More = (),
    b: More = (),
    by: DiffGrouping = "op",
    min_change: str = "2%",
    limit: Limit = 20,
    json: PrintJson = False,
    csv: PrintCsv = False,
) -> None:
    """Rank what changed between captures: stack profile diff BEFORE AFTER --a BEFORE2 BEFORE3 --b AFTER2 AFTER3

    Rows are labelled slower or faster if the change is significant over the repeated steps. With several captures per
    side, taken alternately, the test also covers variation between captures.

    Args:
      a: more captures of the program before.
      b: more captures of the program after.
      by: grouping of the rows: operation, Python line, layer, module or category of work.
      min_change: minimum change of a labelled row, as a share of its time before.
    """
    sides = ([load_trace(path) for path in (first, *more)] for first, more in ((before, a), (after, b)))
    show(difference(*sides, by=by, min_change=share_of(min_change)), limit=limit, json=json, csv=csv)
