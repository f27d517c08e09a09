"""Common parameters of the commands, and printing of answers as a table, JSON or CSV."""

import json as json_format
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter
from cyclopts.validators import Number

from stack_profile.answer import Answer, present
from stack_profile.errors import ProfileError

__all__ = ["Limit", "PageEvents", "PageLimit", "PrintCsv", "PrintJson", "TracePath", "check_formats", "show"]

TracePath = Annotated[
    Path, Parameter(help="a directory with captures, of which the newest is read, or a file *.xplane.pb.")
]
Limit = Annotated[int, Parameter(help="rows to show, 0 for all.", validator=Number(gte=0))]
PageLimit = Annotated[int, Parameter(help="rows of a table, 0 for all.", validator=Number(gte=0))]
PageEvents = Annotated[
    int, Parameter(help="events of the timeline; the shortest beyond are left out.", validator=Number(gte=0))
]
PrintJson = Annotated[bool, Parameter(negative=(), help="print machine-readable results.")]
PrintCsv = Annotated[bool, Parameter(negative=(), help="print the rows as a spreadsheet.")]

_WIDTH: Final = 100_000  # of a file; a table that is wider would lose parts of its cells, also of numbers


def check_formats(*, json: bool, csv: bool) -> None:
    """Raises a ProfileError if both formats are selected, before minutes of reading."""
    if json and csv:
        raise ProfileError("--json and --csv are two formats of the same rows. Leave out one of them.")


def show(
    answer: Answer[Any],
    *,
    limit: int,
    json: bool = False,
    csv: bool = False,
    shorten: Callable[[str], str] = str,
) -> None:
    """Prints an answer to standard output.

    Args:
      answer: the answer.
      limit: maximum number of rows of the table, 0 for all; JSON and CSV have all rows.
      json, csv: formats instead of a table.
      shorten: replaces names of files in the table; JSON and CSV have the absolute names.
    """
    if json:
        print(json_format.dumps(answer.as_mapping(), indent=2))
    elif csv:
        sys.stdout.writelines(answer.as_csv())
    else:
        from rich.console import Console

        # Do not fold lines outside of a terminal, so that files can be searched.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        width = console.width if sys.stdout.isatty() else None
        for part in present(answer, limit or None, shorten, width):
            console.print(part, markup=False, soft_wrap=width is None)
