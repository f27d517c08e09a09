"""`stack bench compile`: compiles implementations for chips that are not attached."""

import dataclasses
import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich.table
from rich.console import Console

from stack_core.abi.errors import BenchmarkError, UnknownName, nearest
from stack_core.abi.plugins import registries
from stack_core.commands.tables import print_table

if TYPE_CHECKING:
    from stack_kernels.laboratory.experiments import Row

__all__ = ["bench_compile"]


def bench_compile(
    *, chips: str = "", implementations: str = "", json: Path | None = None, table: Path | None = None
) -> None:
    """Compile ops for absent chips: stack bench compile --chips v6e,h100 --implementations attention/splash

    Compiles calls of an 8B model with each implementation, forward and with gradient, in one process per chip. Reports
    compile seconds, memory and the kernels of the program with their registers, spills, shared memory and vector
    memory. Needs the compilers (stack-core[tpu] and stack-core[cuda13]) but no chip. The exit status is 1 if a compiler
    failed.

    Args:
      chips: comma-separated names of chips; by default the chips of the table in docs/accelerators.md.
      implementations: comma-separated "op/name"; by default all of stack-core and stack-kernels.
      json: write the result of each call to this file.
      table: update this support table, and the page of the same name next to it.
    """
    from stack_kernels.laboratory.experiments import compile_for
    from stack_kernels.laboratory.table import CHIPS
    from stack_kernels.laboratory.table import implementations as of_stack

    for path in (json, table):
        if path is not None and not path.parent.is_dir():
            raise BenchmarkError(f"{str(path)!r} cannot be written: there is no directory {str(path.parent)!r}.")
    wanted_chips = _chosen("chips", chips, registries.chips.names(), CHIPS)
    names = _chosen("implementations", implementations, registries.ops.names(), of_stack())
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    for chip in wanted_chips:
        rows += compile_for(chip, names, on_row=lambda row: console.print(_line(row), markup=False))
    _print(rows)
    if json is not None:
        json.write_text(json_format.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if table is not None:
        _update(table, names, wanted_chips, rows)
    if failed := [row for row in rows if row.status == "failed"]:
        raise BenchmarkError("\n".join(_line(row) for row in failed))


def _chosen(label: str, listing: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in listing.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UnknownName(f"Unknown name {name!r} among {label}.{nearest(name, known)}")
    return names or list(default)


def _line(row: "Row") -> str:
    subject = f"{row.name} on {row.chip}, {row.call}, {row.direction}: {row.status}"
    return f"{subject}, {row.reason}" if row.reason else f"{subject} in {row.compile_s:.1f} s"


def _print(rows: Sequence["Row"]) -> None:
    columns = (
        "implementation",
        "chip",
        "call",
        "direction",
        "s",
        "VMEM",
        "registers",
        "spilled",
        "shared",
        "temporary",
    )
    shown = rich.table.Table(*columns, "kernels", box=None)
    for row in rows:
        if row.status == "compiled":
            numbers = (row.vector_memory_bytes, row.registers, row.spilled_bytes, row.shared_bytes, row.temporary_bytes)
            kernels = ", ".join(f"{count} {name}" for name, count in row.kernels.items())
            plain = ("" if number is None else f"{number:,}" for number in numbers)
            shown.add_row(row.name, row.chip, row.call, row.direction, f"{row.compile_s:.1f}", *plain, kernels)
    if shown.row_count:
        print_table(shown)


def _update(path: Path, names: Sequence[str], chips: Sequence[str], rows: Sequence["Row"]) -> None:
    """Replaces the cells of these implementations and chips and of the CPU; drops implementations that are gone."""
    import jax

    from stack_kernels.checks import TOKAMAX_VERSION
    from stack_kernels.laboratory.table import COLUMNS, Table, cell_of, implementations, is_of_tokamax, this_processor

    before = Table.read(path) if path.exists() else Table({}, {}, {})
    cells = {name: dict(row) for name, row in before.cells.items() if name in implementations()}
    for name in names:
        fresh = {column: cell_of(name, column, rows) for column in COLUMNS if column in ("cpu", *chips)}
        cells[name] = {column: cell_of(name, column) for column in COLUMNS} | cells.get(name, {}) | fresh
    of_tokamax = [name for name in names if is_of_tokamax(name)]
    versions = dict(before.versions)
    if of_tokamax:
        versions["tokamax"] = f"{TOKAMAX_VERSION}, jax {jax.__version__}"
    if len(of_tokamax) < len(names):
        versions["jax"] = jax.__version__
    Table(versions, this_processor(), cells).write(path)
