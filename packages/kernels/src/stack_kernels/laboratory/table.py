"""Where each implementation ran, was interpreted, compiles or refuses: what the laboratory found, and a page of it.

A cell stands for an implementation on a chip. How many calls it takes there is known without any compiler, so that a
test holds the table to the code.
"""

import contextlib
import functools
import json
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stack_core import ops
from stack_core.abi.errors import BenchmarkError
from stack_core.abi.ops import OpCall
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.machine import cpu_flags, cpu_model
from stack_core.ops.building import answer, implementations_of
from stack_core.testing import first_call, op_checks
from stack_kernels.laboratory.calls import CALLS
from stack_kernels.laboratory.experiments import Row
from stack_kernels.laboratory.interpreted import INTERPRETABLE
from stack_kernels.laboratory.without_cudnn import cudnn_taken_for_granted
from stack_kernels.laboratory.without_tokamax import tokamax_taken_for_granted

__all__ = [
    "CHIPS",
    "COLUMNS",
    "Cell",
    "Table",
    "calls_of",
    "cell_of",
    "implementations",
    "is_of_tokamax",
    "taken",
    "this_processor",
]

CHIPS = ("v5e", "v5p", "v6e", "v7x", "a100-80gb", "h100", "b200")
COLUMNS = ("cpu", *CHIPS)
_FEATURES = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"})
_INTERPRETED_AS = "v6e"
_START, _END = "<!-- table: stack bench compile writes it -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Cell:
    """An implementation on a chip.

    Attributes:
      status: "ran", on the CPU; "interpreted", there too; "compiled"; "refused"; "not tried", of a chip whose compiler
        was not asked.
      cases: how many of `calls_of` it takes.
      reason: of what is refused.
    """

    status: str
    cases: int = 0
    reason: str | None = None


def implementations() -> list[str]:
    """Those that core and stack-kernels register of ops that the laboratory has calls of, "op/name"."""
    of_calls = {call.op for call in CALLS}
    registered = (entry.name for entry in registries.ops.entries() if entry.provider in ("core", "kernels"))
    return sorted(name for name in registered if name.partition("/")[0] in of_calls)


def is_of_tokamax(name: str) -> bool:
    """Whether an implementation, "op/name", is a kernel of Tokamax, which not every environment of ours can have."""
    return name.partition("/")[2].startswith("tokamax")


def this_processor() -> dict[str, Any]:
    """The CPU's model, and what it has of the instructions that kernels are written with."""
    return {"model": cpu_model(), "features": sorted(_FEATURES & cpu_flags())}


@functools.cache
def calls_of(op: str) -> tuple[OpCall, ...]:
    """The calls of the op's contract in float32 and bfloat16 and those of the laboratory, as `supports` sees them.

    Without what needs more devices than there are.
    """
    return tuple(_calls(op))


def _calls(op: str) -> Iterator[OpCall]:
    for check in {check.case: check for check in op_checks(op)}.values():
        with contextlib.suppress(unittest.SkipTest):
            yield from (check.seen(dtype) for dtype in ("float32", "bfloat16"))
    for call in CALLS:
        if call.op == op and call.parts is None:
            function = functools.partial(getattr(ops, op), **call.options)
            yield first_call(lambda arrays, function=function: function(**arrays), dict(call.arrays))


def taken(name: str, column: str) -> tuple[int, str | None]:
    """How many calls an implementation takes on a chip; where that is none, why."""
    op, _, own = name.partition("/")
    found, reasons = implementations_of(op)[own], Counter[str]()
    chosen = contextlib.nullcontext() if column == "cpu" else use_chip(registries.chips[column])
    with chosen, cudnn_taken_for_granted(), tokamax_taken_for_granted():
        answers = [answer(found, call) for call in calls_of(op)]
    count = sum(given is True for given in answers)
    reasons.update(str(given) for given in answers if given is not True)
    return count, None if count else reasons.most_common(1)[0][0]


def cell_of(name: str, column: str, rows: Iterable[Row] = ()) -> Cell:
    """The cell, of a chip from what came of compiling for it.

    Raises:
      BenchmarkError: a compiler failed.
    """
    count, reason = taken(name, column)
    if column == "cpu":
        if count:
            return Cell("ran", count)
        if name in INTERPRETABLE:
            return Cell("interpreted", taken(name, _INTERPRETED_AS)[0])
        return Cell("refused", 0, reason)
    of_cell = [row for row in rows if (row.name, row.chip) == (name, column)]
    if failed := [row for row in of_cell if row.status == "failed"]:
        problems = "\n".join(f"{row.call}, {row.direction}: {row.reason}" for row in failed)
        raise BenchmarkError(f"{name} does not compile for {column}, though its `supports` takes the call:\n{problems}")
    if any(row.status == "compiled" for row in of_cell):
        return Cell("compiled", count)
    if count and not of_cell:
        return Cell("not tried", count)
    return Cell("refused", count, reason or next(row.reason for row in of_cell))


@dataclass(frozen=True)
class Table:
    """The cells by implementation and column, and what they were found with.

    Attributes:
      versions: of jax, and of Tokamax, with that of jax beside it, for the rows of its kernels.
      processor: of the column "cpu", as `this_processor` gives it.
    """

    versions: Mapping[str, str]
    processor: Mapping[str, Any]
    cells: Mapping[str, Mapping[str, Cell]]

    @classmethod
    def read(cls, path: Path) -> "Table":
        found = json.loads(path.read_text())
        cells = {name: {at: Cell(**cell) for at, cell in row.items()} for name, row in found["cells"].items()}
        return cls(found["versions"], found["processor"], cells)

    def write(self, path: Path) -> None:
        """Writes the table, and the page beside it that has its name and shows it."""
        cells = {name: {at: asdict(cell) for at, cell in row.items()} for name, row in sorted(self.cells.items())}
        found = {"versions": self.versions, "processor": self.processor, "cells": cells}
        path.write_text(json.dumps(found, indent=1) + "\n")
        page = path.with_suffix(".md")
        if page.exists():
            page.write_text(self.on_page(page.read_text()))

    def on_page(self, text: str) -> str:
        """A page's text with this table in the place of the one that it has."""
        before, _, rest = text.partition(_START)
        _, _, after = rest.partition(_END)
        return f"{before}{_START}\n{self.markdown()}\n{_END}{after}"

    def markdown(self) -> str:
        """A row an implementation, a column a chip, and the reasons of refusals below."""
        rows = [row for _, row in sorted(self.cells.items())]
        reasons = list(dict.fromkeys(cell.reason for row in rows for cell in row.values() if cell.reason))
        lines = [_line(("", *COLUMNS)), _line(["---"] * (1 + len(COLUMNS)))]
        for name, row in sorted(self.cells.items()):
            lines.append(_line([f"`{name}`", *(_text(row[column], reasons) for column in COLUMNS)]))
        return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def _text(cell: Cell, reasons: Sequence[str]) -> str:
    return f"refused ({reasons.index(cell.reason) + 1})" if cell.reason else f"{cell.status} {cell.cases}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
