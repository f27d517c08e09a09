"""`stack profile`: capture a script, and ask a trace where time and memory went."""

import json as json_format
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from stack_profile.answer import Answer, present

__all__ = ["profile"]

_WIDTH = 400

Switch = Annotated[bool, Parameter(negative=())]

profile = App(name="profile", help="Profile a program, down to the Python line.")


@profile.command(help_flags=[], version_flags=[])  # what follows the script is the script's, its --help too
def run(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Capture a script: stack profile run [--out DIR] [-m] script.py arguments ...

    The script need not know of it. `stack profile run --help` lists the options.
    """
    from stack_profile.commands.run_script import run_script

    run_script(tokens)


@profile.command
def overview(
    trace: Path, /, *, device: str | None = None, limit: int = 20, json: Switch = False, csv: Switch = False
) -> None:
    """Time the steps: how long, how even, how much of them idle, and what the host did then.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      device: one device instead of all of them.
      limit: rows to show, 0 for all.
      json: print machine-readable results.
      csv: print the rows as a spreadsheet.
    """
    from stack_profile.analyses.overview import overview as analysis

    _show(analysis(_load(trace), device=device), limit=limit, json=json, csv=csv)


@profile.command
def ops(
    trace: Path,
    /,
    *,
    by: Literal["category", "layer", "scope", "line", "file", "op"] = "op",
    within: Path | None = None,
    device: str | None = None,
    limit: int = 20,
    json: Switch = False,
    csv: Switch = False,
) -> None:
    """Show where the devices' time went.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      by: what to group operations by.
      within: put time on the innermost line of a file under this directory, such as your own code's.
      device: one device instead of all of them.
      limit: rows to show, 0 for all.
      json: print machine-readable results.
      csv: print the rows as a spreadsheet.
    """
    from stack_profile.analyses.ops import ops as analysis

    folder = str(within.resolve()) if within else ""
    _show(analysis(_load(trace), by=by, device=device, within=folder), limit=limit, json=json, csv=csv)


@profile.command
def roofline(
    trace: Path,
    /,
    *,
    chip: str | None = None,
    device: str | None = None,
    limit: int = 20,
    json: Switch = False,
    csv: Switch = False,
) -> None:
    """Compare operations with what the chip could do.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      chip: one that `stack chips` lists, where the trace does not name its own.
      device: one device instead of all of them.
      limit: rows to show, 0 for all.
      json: print machine-readable results.
      csv: print the rows as a spreadsheet.
    """
    from stack_profile.analyses.roofline import registered_chip
    from stack_profile.analyses.roofline import roofline as analysis

    found = registered_chip(chip) if chip else None
    _show(analysis(_load(trace), device=device, chip=found), limit=limit, json=json, csv=csv)


@profile.command
def memory(
    trace: Path,
    /,
    *,
    by: Literal["buffer", "layer", "line", "kind", "schedule"] = "buffer",
    program: str | None = None,
    limit: int = 20,
    json: Switch = False,
    csv: Switch = False,
) -> None:
    """Show what makes the peak of a program's memory.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      by: what to group arrays by, or the schedule along which temporaries come and go.
      program: the name of its module, such as jit_step; by default the one that took the most time.
      limit: rows to show, 0 for all.
      json: print machine-readable results.
      csv: print the rows as a spreadsheet.
    """
    from stack_profile.analyses.memory import memory as analysis
    from stack_profile.analyses.memory import schedule

    loaded = _load(trace)
    answer = schedule(loaded, program=program) if by == "schedule" else analysis(loaded, by=by, program=program)
    _show(answer, limit=limit, json=json, csv=csv)


@profile.command(name="compile")
def compile_(trace: Path, /, *, limit: int = 20, json: Switch = False, csv: Switch = False) -> None:
    """Show what was compiled, how often, how long it took, and why again.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      limit: rows to show, 0 for all.
      json: print machine-readable results.
      csv: print the rows as a spreadsheet.
    """
    from stack_profile.analyses.compile import compilations

    _show(compilations(_load(trace)), limit=limit, json=json, csv=csv)


@profile.command
def export(
    trace: Path, /, *, to: Literal["perfetto", "speedscope", "folded", "csv"], output: Path | None = None
) -> None:
    """Write a trace for Perfetto, speedscope, flame graphs or a spreadsheet.

    Args:
      trace: a directory with captures, of which the newest is read, or a file *.xplane.pb.
      to: the format.
      output: a file, by default the standard output.
    """
    from stack_profile.exports import EXPORTS, write

    parts = EXPORTS[to](_load(trace))
    if output is None:
        sys.stdout.writelines(parts)
    else:
        write(parts, output)


def _load(path: Path) -> Any:
    from stack_profile.trace import load_trace

    return load_trace(path)


def _show(answer: Answer[Any], *, limit: int, json: bool, csv: bool) -> None:
    if json:
        print(json_format.dumps(answer.as_mapping(), indent=2))
    elif csv:
        sys.stdout.writelines(answer.as_csv())
    else:
        _print(present(answer, limit or None))


def _print(parts: Iterable[Any]) -> None:
    from rich.console import Console

    # Elsewhere than on a terminal nothing is folded, so that it can be searched.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for part in parts:
        console.print(part, markup=False)
