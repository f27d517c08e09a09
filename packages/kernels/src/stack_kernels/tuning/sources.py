"""Where tuned tables come from: those that this package ships, what `tune` measured in this directory, a user's files.

Measurements steer the processes that start in the directory in which they were made, and no others.
`STACK_TUNED_TABLES` names files and folders of tables that are read instead of the shipped ones and the directory's
own, separated as in `PATH`; set and empty, there are none.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from stack_core import ops
from stack_core.abi.errors import TuningError
from stack_kernels.tuning.lookup import OneTable, TunedTables
from stack_kernels.tuning.tables import HERE, TABLES_VARIABLE, ChipName, Table

__all__ = ["MEASURED", "DamagedTableWarning", "known_tables", "table_files", "tuned"]

_SHIPPED = Path(__file__).parents[1] / "tuned"


class DamagedTableWarning(UserWarning):
    """A tuned table cannot be read, and nothing that it holds is used."""


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
    """What all files hold, by chip; one that cannot be read is reported and passed over."""
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
"""The table that this package registers."""


def tuned(table: Table | Path | str) -> contextlib.AbstractContextManager[None]:
    """Chooses ops by one table, and by no other, in what is traced within a `with` block.

    with stack_kernels.tuned("h200.json"):
        step = jax.jit(train_step).lower(state, batch).compile()

    What `jax.jit` traced under other tables is traced again. An empty table, `Table(chip)`, is the choice without
    measurements.

    Args:
      table: what `tune` returned, or the file of one.

    Raises:
      TuningError: the file cannot be read.
    """
    return ops.use_tuned_table(OneTable(table if isinstance(table, Table) else Table.read(Path(table))))
