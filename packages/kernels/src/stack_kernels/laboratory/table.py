"""The support table, with the status of each implementation on each chip, and its page.

A cell stands for an implementation on a chip. The number of supported calls needs no compiler, which lets a test check
the table against the code.
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
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_kernels.laboratory.without_tokamax import pretend_tokamax

__all__ = [
    "CHIPS",
    "COLUMNS",
    "Cell",
    "Table",
    "calls_of",
    "cell_of",
    "count_supported",
    "implementations",
    "is_of_tokamax",
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
      status: "ran" on the CPU; "interpreted" on the CPU; "compiled"; "refused"; "not tried" for a chip whose compiler
        did not run.
      cases: number of supported calls among `calls_of`.
      reason: reason of a refusal.
    """

    status: str
    cases: int = 0
    reason: str | None = None


def implementations() -> list[str]:
    """Lists implementations registered by core and stack-kernels, "op/name", for ops with calls in the laboratory."""
    of_calls = {call.op for call in CALLS}
    registered = (entry.name for entry in registries.ops.entries() if entry.provider in ("core", "kernels"))
    return sorted(name for name in registered if name.partition("/")[0] in of_calls)


def is_of_tokamax(name: str) -> bool:
    """Checks whether an implementation, "op/name", calls Tokamax on GPUs, which not every environment can install."""
    return name == "ring_attention/blocks" or name.partition("/")[2].startswith("tokamax")


def this_processor() -> dict[str, Any]:
    """Returns the CPU's model and its instruction sets that kernels use."""
    return {"model": cpu_model(), "features": sorted(_FEATURES & cpu_flags())}


@functools.cache
def calls_of(op: str) -> tuple[OpCall, ...]:
    """Returns the calls of the op's contract in float32 and bfloat16, and of the laboratory, as `supports` sees them.

    Calls that need more devices than available are skipped.
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


def count_supported(name: str, column: str) -> tuple[int, str | None]:
    """Counts the calls that an implementation supports on a chip; if none, returns the reason."""
    op, _, own = name.partition("/")
    found, reasons = implementations_of(op)[own], Counter[str]()
    chosen = contextlib.nullcontext() if column == "cpu" else use_chip(registries.chips[column])
    with chosen, pretend_cudnn(), pretend_tokamax():
        answers = [answer(found, call) for call in calls_of(op)]
    count = sum(result is True for result in answers)
    reasons.update(str(result) for result in answers if result is not True)
    return count, None if count else reasons.most_common(1)[0][0]


def cell_of(name: str, column: str, rows: Iterable[Row] = ()) -> Cell:
    """Returns the cell; for a chip other than the CPU, from the rows of its compilation.

    Raises:
      BenchmarkError: a compiler failed.
    """
    count, reason = count_supported(name, column)
    if column == "cpu":
        if count:
            return Cell("ran", count)
        if name in INTERPRETABLE:
            return Cell("interpreted", count_supported(name, _INTERPRETED_AS)[0])
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
    """The cells by implementation and column, with the environment of their measurement.

    Attributes:
      versions: version of jax, and for the rows of its kernels the version of Tokamax with its version of jax.
      processor: processor of the column "cpu", as from `this_processor`.
      cells: cells by implementation, then by column.
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
        """Writes the table, and updates the adjacent page of the same name."""
        cells = {name: {at: asdict(cell) for at, cell in row.items()} for name, row in sorted(self.cells.items())}
        found = {"versions": self.versions, "processor": self.processor, "cells": cells}
        path.write_text(json.dumps(found, indent=1) + "\n")
        page = path.with_suffix(".md")
        if page.exists():
            page.write_text(self.on_page(page.read_text()))

    def on_page(self, text: str) -> str:
        """Returns a page's text with its table replaced by this one."""
        before, _, rest = text.partition(_START)
        _, _, after = rest.partition(_END)
        return f"{before}{_START}\n{self.markdown()}\n{_END}{after}"

    def markdown(self) -> str:
        """Formats one row per implementation and one column per chip, with the reasons of refusals below."""
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
