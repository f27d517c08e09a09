"""`stack tune`: measures what could compute a function's ops, and keeps what is fastest."""

import contextlib
import json as json_format
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stack_core.errors import TuningError
from stack_core.named_function import named_function

if TYPE_CHECKING:
    from stack_kernels.tuning.search import Job, TuneReport
    from stack_kernels.tuning.tables import Measurement, Table

__all__ = ["tune"]


def tune(
    target: str | None = None,
    /,
    *,
    budget_s: float = 60.0,
    out: Path | None = None,
    again: Annotated[bool, Parameter(negative=())] = False,
    merge: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    export: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Choose ops by measurement: stack tune FILE.py:fn measures all that could compute the ops of fn(*example_args())

    example_args is a function beside fn that returns the tuple of its arguments; jax.ShapeDtypeStruct do. A function
    without parameters needs none. Results are kept in the user's cache, where every later process finds them.
    Without a function, lists what is known. Ctrl-C keeps what was measured and exits with status 130.

    Args:
      target: the function to tune.
      budget_s: seconds to measure, compilations included.
      out: keep the results in this file instead, for `stack_kernels.tuned`.
      again: measure also what was measured before.
      merge: first take over the measurements of these files.
      export: then write all that is known of this chip there; in a folder, under the chip's name.
      json: print machine-readable results.
    """
    console = Console(highlight=False, soft_wrap=True)
    if merge:
        _merge(merge, out)
    report = None
    if target is not None:
        fn, arguments = named_function(target)
        from stack_kernels.tuning.search import tune as search

        with _progress() as progress:
            report = search(fn, *arguments, budget_s=budget_s, out=out, again=again, progress=progress)
    if export is not None:
        table = _known_here(out)
        table.write(export / table.chip.file_name if export.is_dir() else export)
    if json:
        print(json_format.dumps(_record(report) if report else _records(), indent=2))
    elif report:
        _print(console, report)
    else:
        _print_known(console)
    if report and report.interrupted:
        sys.exit(130)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, a line a job elsewhere; on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda done, total, what: console.print(f"{done}/{total}  {what}", markup=False)
        return
    columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tracing", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _merge(files: Sequence[Path], out: Path | None) -> None:
    from stack_kernels.tuning.tables import Table, user_table_path

    for file in files:
        table = Table.read(file)
        path = user_table_path(table.chip) if out is None else out
        known = Table.read(path) if path.exists() else Table(table.chip)
        known.merge(table).write(path)


def _known_here(out: Path | None) -> "Table":
    """All measurements of this chip: of a file, or of those that are read without being named."""
    from stack_core.hardware import current_chip
    from stack_kernels.tuning.sources import known_tables
    from stack_kernels.tuning.tables import ChipName, Table

    if out is not None:
        return Table.read(out)
    name = ChipName.of(current_chip())
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
            console.print(f"  {_described(found)}", markup=False, style="dim")
    ended = "interrupted, " if report.interrupted else "out of time, " if report.out_of_time else ""
    console.print(f"{ended}{report.duration_s:.1f} s -> {report.path}", markup=False)


def _described(found: "Measurement") -> str:
    from stack_kernels.tuning.lookup import duration

    name = f"{found.implementation} {found.config if found.config is not None else ''}".strip()
    if found.outcome != "measured":
        return f"{name}: {found.outcome}, {found.reason}"
    what = "value and gradient " if found.whole else ""
    return f"{name}: {what}{duration(found.median_s)} +- {found.spread:.0%}, {found.rounds} rounds"


def _record(report: "TuneReport") -> dict[str, Any]:
    return {
        "path": str(report.path),
        "chip": str(report.table.chip),
        "duration_s": report.duration_s,
        "interrupted": report.interrupted,
        "out_of_time": report.out_of_time,
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


def _records() -> list[dict[str, Any]]:
    from stack_kernels.tuning.sources import table_files
    from stack_kernels.tuning.tables import Table

    records: list[dict[str, Any]] = []
    for file in table_files():
        try:
            table = Table.read(file)
        except TuningError as error:
            records.append({"path": str(file), "error": str(error)})
            continue
        cases = {found.case.key for found in table.measurements}
        about = {"chip": str(table.chip), "cases": len(cases), "measurements": len(table.measurements)}
        records.append({"path": str(file), **about})
    return records


def _print_known(console: Console) -> None:
    records = _records()
    for record in records:
        about = (
            record.get("error") or f"{record['chip']}: {record['cases']} cases, {record['measurements']} measurements"
        )
        console.print(f"{record['path']}\n  {about}", markup=False)
    if not records:
        console.print("Nothing was measured yet; `stack tune FILE.py:fn` measures.", markup=False)
