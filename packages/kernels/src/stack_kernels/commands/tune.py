"""`stack tune`: measures the candidates for a function's ops and stores the results in a tuned table."""

import contextlib
import json as json_format
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stack_core.abi.errors import TuningError
from stack_core.commands.named_function import named_function

if TYPE_CHECKING:
    from stack_kernels.tuning.search import Job, TuneReport
    from stack_kernels.tuning.tables import Measurement, Table

__all__ = ["tune"]

# 128 + SIGINT, the exit status that shells report.
_INTERRUPTED = 130
_BUSY_CPUS = 0.25
_BUDGET_S = 60.0


def tune(
    target: str | None = None,
    /,
    *,
    budget_s: float | None = None,
    tables: Path | None = None,
    again: Annotated[bool, Parameter(negative=())] = False,
    clear: Annotated[bool, Parameter(negative=())] = False,
    merge: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    export: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Choose ops by measurement: stack tune FILE.py:fn measures all candidates for the ops of fn(*example_args())

    example_args is a function in the same file that returns the tuple of fn's arguments, as arrays or
    jax.ShapeDtypeStruct; a function without parameters needs none. Results are stored in .stack/tuned and used by
    processes that start in this directory. Without a function, lists the tables in use, or with --tables the tables of
    that folder. Ctrl-C keeps the measurements made so far and exits with status 130.

    Args:
      target: the function to tune.
      budget_s: seconds to measure, compilations included (60).
      tables: folder for the results, by default the first one that STACK_TUNED_TABLES names or .stack/tuned; set
        STACK_TUNED_TABLES to this folder to use the results.
      again: repeat measurements that the table already has.
      clear: delete the tables of the folder first.
      merge: merge the measurements of these files first.
      export: finally write all measurements of this chip to this file; in a folder, under the chip's name.
      json: print machine-readable results.
    """
    _check_options(target, budget_s, again=again)
    found = _read(merge or ())  # before anything is deleted
    if clear:
        _clear(tables)
    _merge(found, tables)
    status = 0
    if target is not None:
        status = _tuned(target, _BUDGET_S if budget_s is None else budget_s, tables, again=again, json=json)
    if export is not None and status in (0, _INTERRUPTED):
        table = _local_table(tables)
        table.write(export / table.chip.file_name if export.is_dir() else export)
    if target is None:
        _print_known(tables, json=json)
    if status:
        sys.exit(status)


def _check_options(target: str | None, budget_s: float | None, *, again: bool) -> None:
    """Raises a TuningError for a budget that is not positive, and for options without effect."""
    if budget_s is not None and not budget_s > 0:
        raise TuningError(f"--budget-s is {budget_s:g}. Give a number of seconds above 0.")
    if target is None and (again or budget_s is not None):
        name = "--again" if again else "--budget-s"
        raise TuningError(f"{name} is for measurements. Name the function to tune, FILE.py:fn, or leave {name} out.")


def _tuned(target: str, budget_s: float, tables: Path | None, *, again: bool, json: bool) -> int:
    """Runs the measurement in a child process; in the child, measures."""
    from stack_kernels.tuning.child import TRYING_VARIABLE, tune_in_child

    if TRYING_VARIABLE not in os.environ:
        options = [*(["--tables", str(tables)] if tables is not None else []), *(["--json"] if json else [])]
        say = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
        return tune_in_child([target, *options], budget_s=budget_s, again=again, folder=tables, say=say)
    fn, arguments = named_function(target)
    from stack_core.chips import current_chip
    from stack_kernels.tuning.search import tune as search
    from stack_kernels.tuning.tables import ChipName, local_table_path

    out = local_table_path(ChipName.of(current_chip()), tables)
    trying = Path(os.environ[TRYING_VARIABLE])
    with _progress() as progress:
        report = search(fn, *arguments, budget_s=budget_s, out=out, again=again, progress=progress, trying=trying)
    if json:
        print(json_format.dumps(_record(report), indent=2))
    else:
        _print(Console(highlight=False, soft_wrap=True), report)
    return _INTERRUPTED if report.interrupted else 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Reports progress on standard error: a bar on a terminal, otherwise one line per job."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda finished, total, job: console.print(f"{finished}/{total}  {job}", markup=False)
        return
    columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tracing", total=None)
        yield lambda finished, total, job: bar.update(task, completed=finished, total=total, description=job)


def _clear(folder: Path | None) -> None:
    from stack_kernels.tuning.tables import Table, local_folder

    console = Console(highlight=False, soft_wrap=True, stderr=True)
    for file in sorted((folder or local_folder()).glob("*.json")):
        try:
            Table.read(file)
        except TuningError as error:
            console.print(f"kept: {error}", markup=False)
            continue
        file.unlink()
        console.print(f"deleted {file}", markup=False)


def _read(files: Sequence[Path]) -> "list[Table]":
    from stack_kernels.tuning.tables import Table

    return [Table.read(file) for file in files]


def _merge(tables: "Sequence[Table]", folder: Path | None) -> None:
    from stack_kernels.tuning.tables import Table, local_table_path

    for table in tables:
        path = local_table_path(table.chip, folder)
        known = Table.read(path) if path.exists() else Table(table.chip)
        known.merge(table).write(path)


def _local_table(folder: Path | None) -> "Table":
    """Returns all measurements of this chip: from a folder, or from the tables that every process reads."""
    from stack_core.chips import current_chip
    from stack_kernels.tuning.sources import known_tables
    from stack_kernels.tuning.tables import ChipName, Table, local_table_path

    name = ChipName.of(current_chip())
    if folder is not None:
        return Table.read(local_table_path(name, folder))
    tables = known_tables()
    if name not in tables:
        raise TuningError(f"Nothing was measured on {name}; `stack tune FILE.py:fn` measures.")
    return tables[name]


def _print(console: Console, report: "TuneReport") -> None:
    for job in report.jobs:
        change = f"{job.before} -> {job.after}" if job.before != job.after else f"{job.after}, as before"
        note = job.skipped or ("known already" if job.cached else "")
        console.print(f"{job.calls} x {job}: {change}{f' ({note})' if note else ''}", markup=False)
        for found in sorted(report.measured(job), key=lambda found: found.median_s or math.inf):
            console.print(f"  {_describe(found)}", markup=False, style="dim")
    ended = "interrupted, " if report.interrupted else "out of time, " if report.out_of_time else ""
    console.print(f"{ended}{report.duration_s:.1f} s -> {report.path}", markup=False)
    if report.others_cpus is not None and report.others_cpus > _BUSY_CPUS:
        warning = (
            f"Other programs used {report.others_cpus:.1f} processors meanwhile; measure again when they have ended."
        )
        console.print(warning, markup=False, style="yellow")


def _describe(found: "Measurement") -> str:
    from stack_kernels.tuning.lookup import duration

    name = f"{found.implementation} {found.config if found.config is not None else ''}".strip()
    if found.outcome != "measured":
        return f"{name}: {found.outcome}, {found.reason}"
    scope = "value and gradient " if found.whole else ""
    return f"{name}: {scope}{duration(found.median_s)} +- {found.spread:.0%}, {found.rounds} rounds"


def _record(report: "TuneReport") -> dict[str, Any]:
    return {
        "path": str(report.path),
        "chip": str(report.table.chip),
        "duration_s": report.duration_s,
        "interrupted": report.interrupted,
        "out_of_time": report.out_of_time,
        "others_cpus": report.others_cpus,
        "calls": [_job_record(report, job) for job in report.jobs],
    }


def _job_record(report: "TuneReport", job: "Job") -> dict[str, Any]:
    keys = ("implementation", "config", "outcome", "reason", "median_s", "spread", "rounds")
    return {
        "op": job.case.shape.op,
        "direction": job.case.direction,
        "sizes": dict(job.case.shape.sizes),
        "calls": job.calls,
        "sources": list(job.sources),
        "before": str(job.before),
        "after": str(job.after),
        "reason": job.reason,
        "cached": job.cached,
        "skipped": job.skipped,
        "measurements": [{key: getattr(found, key) for key in keys} for found in report.measured(job)],
    }


def _records(folder: Path | None) -> list[dict[str, Any]]:
    from stack_kernels.tuning.sources import table_files
    from stack_kernels.tuning.tables import Table

    records: list[dict[str, Any]] = []
    for file in table_files() if folder is None else sorted(folder.glob("*.json")):
        try:
            table = Table.read(file)
        except TuningError as error:
            records.append({"path": str(file), "error": str(error)})
            continue
        cases = {found.case.key for found in table.measurements}
        about = {"chip": str(table.chip), "cases": len(cases), "measurements": len(table.measurements)}
        records.append({"path": str(file), **about})
    return records


def _print_known(folder: Path | None, *, json: bool) -> None:
    records = _records(folder)
    if json:
        print(json_format.dumps(records, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for record in records:
        about = (
            record.get("error") or f"{record['chip']}: {record['cases']} cases, {record['measurements']} measurements"
        )
        console.print(f"{record['path']}\n  {about}", markup=False)
    if not records:
        console.print("Nothing was measured yet; `stack tune FILE.py:fn` measures.", markup=False)
