"""Sources of tuned tables: tables shipped with this package, measurements of this directory, and a user's files.

Measurements affect only processes that start in the directory of the measuring process. `STACK_TUNED_TABLES` names
files and folders of tables, separated as in `PATH`, that replace the shipped tables and the directory's own; set but
empty, it disables tables.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from stack_core import ops
from stack_core.abi.errors import TuningError
from stack_kernels.checks import TABLES_VARIABLE
from stack_kernels.tuning.lookup import OneTable, TunedTables
from stack_kernels.tuning.tables import HERE, ChipName, Table

__all__ = ["MEASURED", "DamagedTableWarning", "known_tables", "table_files", "tuned"]

_SHIPPED = Path(__file__).parents[1] / "tuned"


class DamagedTableWarning(UserWarning):
    """A tuned table cannot be read and is ignored."""


def table_files() -> list[Path]:
    """Table files in increasing precedence."""
    chosen = os.environ.get(TABLES_VARIABLE)
    if chosen is not None:
        places = [Path(place) for place in chosen.split(os.pathsep) if place]
        return [file for place in places for file in (_in_folder(place) if place.is_dir() else [place])]
    return [file for folder in (_SHIPPED, HERE) for file in _in_folder(folder)]


def _in_folder(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def known_tables() -> dict[ChipName, Table]:
    """Returns the merged tables of all files, by chip; warns about unreadable files and skips them."""
    tables: dict[ChipName, Table] = {}
    for table in _readable():
        tables[table.chip] = tables[table.chip].merge(table) if table.chip in tables else table
    return tables


def _readable() -> Iterator[Table]:
    for file in table_files():
        try:
            yield Table.read(file)
        except TuningError as error:
            warnings.warn(f"{error} Ops are chosen without it.", DamagedTableWarning, stacklevel=2)


MEASURED = TunedTables(lambda: list(known_tables().values()))
"""The tuned table that this package registers."""


def tuned(table: Table | Path | str) -> contextlib.AbstractContextManager[None]:
    """Chooses ops by one table only, in functions traced within a `with` block.

    with stack_kernels.tuned("h200.json"):
        step = jax.jit(train_step).lower(state, batch).compile()

    Functions that `jax.jit` traced under other tables are traced again. An empty table, `Table(chip)`, gives the choice
    without measurements.

    Args:
      table: a table, such as `TuneReport.table`, or a table's file.

    Raises:
      TuningError: the file cannot be read.
    """
    return ops.use_tuned_table(OneTable(table if isinstance(table, Table) else Table.read(Path(table))))
