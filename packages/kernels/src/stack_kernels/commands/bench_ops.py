"""`stack bench ops`: measures the speed of ops on this device and checks it against a baseline."""

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stack_core.abi.errors import BenchmarkError
from stack_kernels.bench.selection import Selection

if TYPE_CHECKING:
    from stack_kernels.bench.compare import Comparison
    from stack_kernels.bench.results import Results, Row
    from stack_kernels.bench.run import Task

__all__ = ["bench_ops"]

_MAX_ROUNDS = 50
_CONFIRMATIONS = 2

_EVERYTHING = Selection()


def bench_ops(
    *,
    selection: Annotated[Selection, Parameter(name="*")] = _EVERYTHING,
    rounds: int = 15,
    budget_s: float = math.inf,
    compare: Path | None = None,
    tolerance: float = 0.05,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Measure ops at standard sizes, in turns with core's references: stack bench ops --compare baseline.json

    A time is the median over the rounds, until the call has completed; +- is the interquartile range over the median.
    With --compare the exit status is 1 if a call became slower than in the baseline, at 99% confidence and by more than
    the tolerance, and two repeated measurements confirm it. The compared quantity is the call's time over the
    reference's time.

    Args:
      rounds: turns per call, at most 50.
      budget_s: approximate time limit in seconds; calls not reached are skipped.
      compare: results of an earlier run on this chip.
      tolerance: relative slowdown that is tolerated; 0.05 is 5%.
      json: write the results to this file, as a baseline for later runs.
      html: write a report with plots to this file; needs stack-kernels[plots].
    """
    _check(rounds, budget_s, tolerance, writes=(json, html))
    from stack_core.chips import current_chip
    from stack_kernels.bench.compare import check_comparable
    from stack_kernels.bench.report import check_plots, write_report
    from stack_kernels.bench.results import Results
    from stack_kernels.bench.run import results

    if html is not None:
        check_plots()
    baseline = None if compare is None else Results.read(compare)
    tasks = selection.tasks()
    if baseline is not None:
        check_comparable(baseline, current_chip(), [task.key for task in tasks], where=str(compare))
    measured = _Measuring(rounds, time.monotonic() + budget_s)
    rows = measured(tasks)
    if not rows:
        raise BenchmarkError("\n".join(["Nothing was measured.", *measured.left_out, *measured.failed]))
    found = results(rows)
    comparisons = () if baseline is None else _confirmed(baseline, found, tasks, tolerance, _Measuring(rounds))
    _print(found, comparisons, measured.left_out)
    if baseline is not None:
        _print_comparison(baseline, found, comparisons, tolerance)
    if json is not None:
        found.write(json)
    if html is not None:
        write_report(html, found, comparisons, baseline)
    if measured.failed:
        raise BenchmarkError("\n".join(measured.failed))
    if any(comparison.verdict == "slower" for comparison in comparisons):
        sys.exit(1)


def _check(rounds: int, budget_s: float, tolerance: float, writes: Sequence[Path | None]) -> None:
    if not 1 <= rounds <= _MAX_ROUNDS or not budget_s > 0 or not tolerance >= 0:
        raise BenchmarkError(
            f"Given are {rounds} rounds, a budget of {budget_s} s and a tolerance of {tolerance}; expected 1 to "
            f"{_MAX_ROUNDS} rounds, a budget above 0 and a tolerance of at least 0."
        )
    for path in writes:
        if path is not None and not path.parent.is_dir():
            raise BenchmarkError(f"{str(path)!r} cannot be written: there is no directory {str(path.parent)!r}.")


@dataclass
class _Measuring:
    """Measures tasks in order and shows progress.

    Attributes:
      rounds: turns per call.
      end_s: end of the budget on the monotonic clock.
      left_out: tasks that were not measured, with the reason.
      failed: errors of tasks that raised.
    """

    rounds: int
    end_s: float = math.inf
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __call__(self, tasks: Sequence["Task"], label: str = "measuring") -> list["Row"]:
        from stack_kernels.bench.run import measured

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rows: list[Row] = []
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = bar.add_task(label, total=len(tasks))
            for place, task in enumerate(tasks):
                bar.update(shown, description=f"{label} {task}", completed=place)
                row = self._measured(measured, task)
                if isinstance(row, str):
                    self.left_out.append(f"{task}: {row}")
                else:
                    rows.append(row)
                if not console.is_terminal:
                    result = row if isinstance(row, str) else _time(row.timing.median_s).strip()
                    print(f"[{place + 1}/{len(tasks)}] {label} {task}: {result}", file=sys.stderr, flush=True)
        return rows

    def _measured(self, measured: "Callable[..., Row | str]", task: "Task") -> "Row | str":
        remaining_s = self.end_s - time.monotonic()
        if remaining_s <= 0:
            return "the time budget did not reach it"
        try:
            return measured(task, rounds=self.rounds, budget_s=remaining_s)
        except BenchmarkError as error:  # the remaining tasks are still measured
            self.failed.append(str(error))
            return "it failed"


def _confirmed(
    baseline: "Results", found: "Results", tasks: Sequence["Task"], tolerance: float, measuring: _Measuring
) -> "tuple[Comparison, ...]":
    """Compares with the baseline; a call counts as slower only if up to two repeated measurements agree."""
    from stack_kernels.bench.compare import compare

    comparisons = {comparison.now.key: comparison for comparison in compare(baseline, found.rows, tolerance=tolerance)}
    for _ in range(_CONFIRMATIONS):
        slower = [task for task in tasks if _is_slower(comparisons.get(task.key))]
        if not slower:
            break
        again = compare(baseline, measuring(slower, "measuring again"), tolerance=tolerance)
        for comparison in again:
            comparisons[comparison.now.key] = comparison
    return tuple(comparisons.values())


def _is_slower(comparison: "Comparison | None") -> bool:
    return comparison is not None and comparison.verdict == "slower"


def _print(found: "Results", comparisons: "Sequence[Comparison]", left_out: Sequence[str]) -> None:
    compared = {comparison.now.key: comparison for comparison in comparisons}
    print(f"{found.heading}. Peaks: {found.provenance}.")
    for title, rows in itertools.groupby(found.rows, lambda row: f"{row.op}, {row.model} {row.case}"):
        print(title)
        for row in rows:
            print(f"  {row.dtype:8} {row.direction:8} {_line(row, compared.get(row.key))}")
    for line in left_out:
        print(f"left out: {line}")


def _line(row: "Row", comparison: "Comparison | None") -> str:
    share = "roofline not known" if row.roofline_share is None else f"{row.roofline_share:4.0%} of {row.denominator}"
    ratio = row.timing.ratio_to(row.reference_timing)
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.high) else ""
    cells = [
        f"{_time(row.timing.median_s)} +-{row.timing.spread:4.0%}",
        f"{row.ratio:5.2f}x the reference's{interval:13}",
        f"{share:28}",
        row.ran,
    ]
    if comparison is not None:
        change = "" if comparison.change is None else f"{comparison.change - 1:+.1%} "
        cells.append(f"{change}{comparison.verdict}")
    return "  ".join(cells)


def _time(seconds: float) -> str:
    for unit, scale in (("s ", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:7.2f} {unit}"
    return f"{seconds * 1e6:7.2f} us"


def _print_comparison(
    baseline: "Results", found: "Results", comparisons: "Sequence[Comparison]", tolerance: float
) -> None:
    from stack_kernels.bench.compare import CONFIDENCE

    counts = Counter(comparison.verdict for comparison in comparisons)
    listing = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(
        f"Compared with the baseline of {baseline.date[:10]}: {listing}; changes beyond {tolerance:.0%}, at "
        f"{CONFIDENCE:.0%} confidence for all calls together."
    )
    if counts["too few rounds"]:
        print(f"Too few rounds for a significant result on {len(comparisons)} calls; raise --rounds.")
    for name, number in baseline.versions.items():
        if found.versions.get(name) != number:
            print(f"{name} was {number} and is {found.versions.get(name)}: the reference's speed may differ, too.")
    for comparison in comparisons:
        if comparison.verdict == "slower" and comparison.before is not None:
            before, now = comparison.before, comparison.now
            print(
                f"slower: {now.title}: {before.ratio:.2f}x the reference's time then ({before.ran}), "
                f"{now.ratio:.2f}x now ({now.ran})"
            )
