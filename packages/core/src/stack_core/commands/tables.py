"""Tables on standard output without truncated names."""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["print_table"]


def print_table(table: Table) -> None:
    """Prints a table at the terminal's width, or wider if its longest words need more; cells are never cut or split."""
    console = Console(file=sys.stdout, highlight=False)
    options = console.options.update(max_width=sys.maxsize)

    def measure(column: Column) -> Measurement:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        return Measurement(max(cell.minimum for cell in cells), max(cell.maximum for cell in cells))

    # Rich would truncate the widest columns. Here each gets its longest word first, then a share of the rest.
    measured = [measure(column) for column in table.columns]
    needed = Measurement.get(console, options, table).minimum  # with borders
    spare, missing = max(console.width - needed, 0), sum(each.span for each in measured)
    for column, each in zip(table.columns, measured, strict=True):
        column.width = each.minimum + min(each.span, spare * each.span // max(missing, 1))
    console.width = max(console.width, needed)
    console.print(table)
