"""Terminal tables that fit a width: numbers are never broken, long names keep both of their ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, element

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["fitted_lines", "fitted_table", "html_table"]

_GAP: Final = 2  # spaces between columns
_MIN_TEXT: Final = 14
_MIN_SENTENCE: Final = 28
_WORDS: Final = 5  # texts with at least as many words are sentences, which may go over several lines


@dataclass
class _Column:
    """A column of texts.

    Attributes:
      name: field of the rows.
      cells: formatted values.
      is_text: True if the values are texts, which may be shortened.
      width: width in characters.
    """

    name: str
    cells: list[str]
    is_text: bool
    width: int = 0

    @property
    def has_sentences(self) -> bool:
        return any(len(cell.split()) >= _WORDS for cell in self.cells)

    @property
    def min_width(self) -> int:
        """Width of the longest word of the title, and of the longest number."""
        head = max(map(len, title(self.name).split()), default=0)
        longest = max(map(len, self.cells), default=0)
        text = _MIN_SENTENCE if self.has_sentences else _MIN_TEXT
        return max(head, min(longest, text) if self.is_text else longest)

    @property
    def full_width(self) -> int:
        return max(self.min_width, max(map(len, self.cells), default=0))


def fitted_table(
    names: Sequence[str], rows: Sequence[object], shorten: Callable[[str], str], width: int | None
) -> "tuple[Table, list[str]]":
    """Formats rows without empty columns.

    Args:
      names: fields of the rows.
      rows: dataclasses.
      shorten: replaces names of files in the cells.
      width: maximum width in characters; None for the width that the rows need.

    Returns:
      The table, and the titles of the columns that do not fit, the last ones.
    """
    from rich.table import Table

    columns = _columns(names, rows, shorten)
    left_out = [] if width is None else _fit(columns, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            title(column.name),
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=width is None,
            width=None if width is None else column.width,
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table, left_out


def html_table(names: Sequence[str], rows: Sequence[object]) -> Markup:
    """Formats rows as an HTML table, without empty columns."""
    columns = _columns(names, rows, str)
    heads = (element("th", title(column.name), scope="col") for column in columns)
    body = (
        element("tr", *(element("td", cell) for cell in cells))
        for cells in zip(*(c.cells for c in columns), strict=True)
    )
    return element("table", element("thead", element("tr", *heads)), element("tbody", *body))


def _columns(names: Sequence[str], rows: Sequence[object], shorten: Callable[[str], str]) -> list[_Column]:
    columns = []
    for name in names:
        values = [getattr(row, name) for row in rows]
        if any(value not in (None, "") for value in values):
            is_text = not any(isinstance(value, int | float) for value in values)
            columns.append(_Column(name, [shorten(number(name, value)) for value in values], is_text))
    return columns


def _fit(columns: list[_Column], width: int) -> list[str]:
    """Sets the widths of columns, and removes the last columns that do not fit.

    Numbers go before texts, but names that only lead to events go before the numbers that sentences explain.
    """
    left_out = []
    explained = any(column.has_sentences for column in columns if column.is_text)
    while len(columns) > 1 and sum(column.min_width + _GAP for column in columns) - _GAP > width:
        # The first two columns name the row and have its most important number.
        place = max(
            (
                place
                for place, column in enumerate(columns)
                if place > 1 and column.is_text == explained and not column.has_sentences
            ),
            default=len(columns) - 1,
        )
        left_out.append(title(columns.pop(place).name))
    free = width - sum(column.min_width + _GAP for column in columns) + _GAP
    # The shortest texts are filled first; what they do not need goes to the longer ones.
    ordered = sorted(columns, key=lambda column: column.full_width - column.min_width)
    for place, column in enumerate(ordered):
        extra = min(column.full_width - column.min_width, free // (len(ordered) - place))
        column.width, free = column.min_width + extra, free - extra
        column.cells = [_shortened(cell, column.width) for cell in column.cells]
    return left_out[::-1]


def _shortened(text: str, width: int) -> str:
    """Cuts the middle out of a long name, whose end tells it from others; sentences stay whole."""
    if len(text) <= width or len(text.split()) >= _WORDS:
        return text
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def fitted_lines(items: Sequence[str], width: int | None) -> str:
    """Joins short texts by commas, and breaks lines only between them."""
    lines = [""]
    for place, item in enumerate(items):
        text = item if place == len(items) - 1 else f"{item}, "
        if width is not None and lines[-1] and len(lines[-1]) + len(text.rstrip()) > width:
            lines.append("")
        lines[-1] += text
    return "\n".join(line.rstrip() for line in lines)
