"""Benchmark report as one self-contained HTML file with plots and a table."""

import html
import importlib
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_core.abi.installing import install_command
from stack_serve.bench.results import TIMES, Point, Results

__all__ = ["check_plots", "write_report"]

_SHOWN = ("p50", "p99")
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; }}
table {{ border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: left; white-space: nowrap; }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
<p>{notes}</p>
{plots}
<table><thead><tr>{columns}</tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""


def check_plots() -> None:
    """Raises BenchmarkError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BenchmarkError(
            "A report with plots needs matplotlib, which is not installed; --json needs nothing. Install it: "
            f"{install_command('stack-serve[plots]')}"
        ) from error


def write_report(path: Path, found: Results, baseline: Results | None = None) -> None:
    """Writes results, and an optional baseline for comparison, as an HTML report.

    Raises:
      BenchmarkError: matplotlib is not installed, or the file cannot be written.
    """
    check_plots()
    workload = ", ".join(f"{name} {value}" for name, value in found.workload.items())
    notes = [f"{found.address}, {found.date[:19]}: {workload}."]
    if found.objective is not None:
        limits = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in found.objective.items())
        notes.append(f"Goodput counts requests within {limits}.")
    if baseline is not None:
        notes.append(f"Dashed: {baseline.model} at {baseline.address}, {baseline.date[:19]}.")
    page = _PAGE.format(
        title=html.escape(f"Load on {found.model}"),
        notes="</p><p>".join(map(html.escape, notes)),
        plots="\n".join(_plots(found, baseline)),
        columns="".join(f"<th>{html.escape(name)}</th>" for name in _row(None)),
        rows="\n".join(_table_row(point) for point in found.points),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"The report cannot be written to {str(path)!r}: {error}.") from error


def _table_row(point: Point) -> str:
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in _row(point).values())
    return f"<tr>{cells}</tr>"


def _row(point: Point | None) -> dict[str, str]:
    """Returns the table cells of a point by heading; for None all cells are empty."""

    def text(cell: Callable[[Point], str]) -> str:
        return "" if point is None else cell(point)

    cells = {
        "load": text(lambda point: point.title),
        "completed": text(lambda point: f"{point.completed} of {point.requests}"),
        "failures": text(lambda point: ", ".join(f"{count} {kind}" for kind, count in point.failures.items())),
        "answer tokens/s": text(lambda point: _number(point.answer_tokens_per_s)),
        "tokens/s": text(lambda point: _number(point.total_tokens_per_s)),
        "requests/s": text(lambda point: f"{point.requests_per_s:.3g}"),
        "goodput/s": text(lambda point: _number(point.goodput_per_s, 3)),
    }
    for name, title in TIMES.items():
        for share in ("p50", "p90", "p95", "p99"):
            cells[f"{title} {share}, ms"] = text(lambda point, name=name, share=share: _ms(point, name, share))
    return cells


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _speed(point: Point) -> float:
    return math.nan if point.answer_tokens_per_s is None else point.answer_tokens_per_s


def _ms(point: Point, name: str, share: str) -> str:
    times = getattr(point, name)
    return "" if times is None else f"{1e3 * getattr(times, share):.4g}"


def _plots(found: Results, baseline: Results | None) -> list[str]:
    """Draws throughput and latencies over the load as SVG, one figure for each kind of load."""
    plots = []
    for kind, unit in (("rate", "requests a second"), ("concurrency", "requests at once")):
        points = [point for point in found.points if point.kind == kind and math.isfinite(point.value)]
        if not points:
            continue
        earlier = [point for point in (baseline.points if baseline else ()) if point.kind == kind]
        plots.append(_figure(points, [point for point in earlier if math.isfinite(point.value)], unit))
    return plots


def _figure(points: Sequence[Point], earlier: Sequence[Point], unit: str) -> str:
    # pyplot is avoided because it selects a window system and keeps global state. The import is dynamic to allow type
    # checking without matplotlib.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 6.5), layout="constrained")
    throughput, *others = figure.subplots(2, 3).flat
    _line(throughput, points, earlier, _speed, color="C0")
    throughput.set_title("answer tokens a second")
    for axes, (name, title) in zip(others, TIMES.items(), strict=False):
        for color, share in enumerate(_SHOWN):

            def value(point: Point, name: str = name, share: str = share) -> float:
                times = getattr(point, name)
                return math.nan if times is None else 1e3 * getattr(times, share)

            _line(axes, points, earlier, value, label=share, color=f"C{color}")
        axes.set_title(f"{title}, ms")
        axes.legend()
    trade_off = others[-1]
    for line, series in (("o-", points), ("x--", earlier)):
        known = [point for point in series if point.tpot_s is not None]
        speeds = [1 / point.tpot_s.p50 for point in known if point.tpot_s is not None and point.tpot_s.p50 > 0]
        if len(speeds) == len(known):
            trade_off.plot(speeds, [_speed(point) for point in known], line, color="C0")
    trade_off.set_title("answer tokens/s of all, over those of one (p50)")
    for axes in (throughput, *others[:-1]):
        axes.set_xlabel(unit)
    for axes in figure.axes:
        axes.grid(linewidth=0.3)
        axes.set_ylim(bottom=0)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _line(
    axes: Any, points: Sequence[Point], earlier: Sequence[Point], value: Callable[[Point], float], **style: str
) -> None:
    axes.plot([point.value for point in points], [value(point) for point in points], "o-", **style)
    if earlier:
        unnamed = {**style, "label": "_"}
        axes.plot([point.value for point in earlier], [value(point) for point in earlier], "x--", **unnamed)
