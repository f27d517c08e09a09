"""The result type of all analyses: totals and rows, as a table, JSON, CSV or a DataFrame.

A field's name ends with its unit, as in `stack_core.report.fields`.
"""

import csv
import dataclasses
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from stack_core.abi.installing import install_command
from stack_core.report.fields import number, title
from stack_core.report.plots import Plot
from stack_profile.answer_table import fitted_lines, fitted_table, html_table
from stack_profile.errors import ProfileError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Answer", "present", "share_of"]

Row = TypeVar("Row")

_NOTEBOOK_ROWS: Final = 50
_PRINTED_ROWS: Final = 20  # as of the commands


@dataclass(frozen=True, repr=False)
class Answer(Generic[Row]):
    """The result of an analysis. `print(answer)` prints the table of the command.

    Attributes:
      name: name of the analysis, with its grouping if it has one.
      facts: totals by name, including the denominators of all shares.
      row_type: dataclass of the rows, also set for an answer without rows.
      rows: rows in display order.
      notes: explanations of the numbers and of missing data.
      plots: plots for the HTML report.
    """

    name: str
    facts: Mapping[str, Any]
    row_type: type[Row]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()

    def as_mapping(self) -> dict[str, Any]:
        """Returns the answer as a JSON-serializable mapping, without plots."""
        rows = [dataclasses.asdict(row) for row in self.rows]  # pyrefly: ignore
        return {"analysis": self.name, "facts": dict(self.facts), "rows": rows, "notes": list(self.notes)}

    def as_pandas(self) -> Any:
        """Returns the rows as a `pandas.DataFrame`.

        Raises:
          ProfileError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ProfileError(f"pandas is not installed: {install_command('stack-profile[pandas]')}") from error
        return pandas.DataFrame(self.as_mapping()["rows"], columns=self.columns)

    def as_csv(self) -> Iterator[str]:
        """Yields the lines of a CSV file, header first; None becomes an empty cell."""
        for cells in (self.columns, *([getattr(row, name) for name in self.columns] for row in self.rows)):
            line = io.StringIO()
            csv.writer(line, lineterminator="\n").writerow(cells)
            yield line.getvalue()

    @property
    def columns(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.row_type)]  # pyrefly: ignore

    def table(self, limit: int | None = None, shorten: Callable[[str], str] = str, width: int | None = None) -> "Table":
        """Formats the first `limit` rows as a terminal table, without empty columns.

        Args:
          limit: maximum number of rows; None for all.
          shorten: replaces names of files in the cells.
          width: maximum width in characters, in which the last columns may be missing; None for no maximum.
        """
        return fitted_table(self.columns, self.rows[:limit], shorten, width)[0]

    def __repr__(self) -> str:
        return f"<Answer of {self.name}: {len(self.rows):,} rows of {', '.join(self.columns)}>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=10_000, highlight=False, color_system=None)
        for part in present(self, _PRINTED_ROWS):
            console.print(part, markup=False, soft_wrap=True)
        return console.file.getvalue().rstrip("\n")  # pyrefly: ignore

    def _repr_html_(self) -> str:
        """Formats facts, the first rows and notes for a notebook, in a frame, because plots need the style sheet."""
        from stack_core.report.document import document, framed, key_values
        from stack_core.report.markup import element
        from stack_core.report.svg import draw

        parts = [key_values(self.facts), *map(draw, self.plots)]
        parts.append(html_table(self.columns, self.rows[:_NOTEBOOK_ROWS]))
        if len(self.rows) > _NOTEBOOK_ROWS:
            parts.append(element("p", f"The first {_NOTEBOOK_ROWS} of {len(self.rows):,} rows."))
        page = document(self.name, *parts, element("ul", *(element("li", note) for note in self.notes)))
        return framed(page, self.name, height_px=600)


def present(
    answer: Answer[Any],
    limit: int | None = None,
    shorten: Callable[[str], str] = str,
    width: int | None = None,
) -> Iterable[Any]:
    """Yields the parts of the terminal output: facts, table, number of omitted rows, notes.

    Args:
      answer: the answer.
      limit: maximum number of rows; None for all.
      shorten: replaces names of files.
      width: maximum width in characters; None for no maximum.
    """
    facts = [shorten(f"{title(name)}: {number(name, value)}") for name, value in answer.facts.items()]
    yield fitted_lines(facts, width)
    left_out: list[str] = []
    if answer.rows:
        table, left_out = fitted_table(answer.columns, answer.rows[:limit], shorten, width)
        yield table
    else:
        yield "No rows: see the notes." if answer.notes else "No rows."
    if limit is not None and len(answer.rows) > limit:
        yield f"... and {len(answer.rows) - limit} more rows; --limit 0 shows all."
    if left_out:
        yield f"... and {', '.join(left_out)}, for which the terminal is too narrow; --json and --csv have them."
    yield from (f"note: {shorten(note)}" for note in answer.notes)


def share_of(text: str) -> float:
    """Parses a share, "3%" or "0.03", into a fraction.

    Raises:
      ProfileError: the text is neither, or the share is negative.
    """
    number_, percent, rest = text.partition("%")
    try:
        share = float(number_) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not share >= 0:
        raise ProfileError(f"{text!r} is not a share. Write one as 3% or as 0.03.")
    return share
