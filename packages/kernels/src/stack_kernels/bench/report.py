"""Results as a self-contained HTML file: plots, a table, and a description of the run."""

import html
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_core.abi.errors import BenchmarkError
from stack_core.abi.installing import install_command

if TYPE_CHECKING:
    from stack_kernels.bench.compare import Comparison
    from stack_kernels.bench.results import Results, Row

__all__ = ["check_plots", "write_report"]

_HEADINGS = (
    "call", "ran", "time", "spread", "CPU time", "reference", "over reference", "share of roofline", "over baseline"
)  # fmt: skip
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: left; white-space: nowrap; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
tr.slower td {{ background: #fbdcdc; }} tr.faster td {{ background: #dff2df; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
<p>{heading}.</p>
<p>{notes}</p>
{plots}
<table><thead><tr>{columns}</tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""


def check_plots() -> None:
    """Raises BenchmarkError if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BenchmarkError(
            "A report with plots needs matplotlib, which is not installed; --json needs nothing. Install it: "
            f"{install_command('stack-kernels[plots]')}"
        ) from error


def write_report(
    path: Path, found: "Results", comparisons: "Sequence[Comparison]" = (), baseline: "Results | None" = None
) -> None:
    """Writes the report.

    Raises:
      BenchmarkError: matplotlib is missing, or the file cannot be written.
    """
    check_plots()
    compared = {comparison.now.key: comparison for comparison in comparisons}
    notes = [
        "Times are medians of rounds in which the call and core's reference took turns; the spread is their "
        "interquartile range over the median. The share of the roofline is the shortest time that the chip's peaks "
        "allow over the median, beside the peak that decides; above 100% operands stay in caches, or the peak was "
        "measured while the machine was busy.",
        f"Peaks: {found.provenance}.",
    ]
    if baseline is not None:
        notes.append(f"Baseline: {baseline.heading}.")
    page = _PAGE.format(
        title=f"Ops on {html.escape(found.chip_name)}, {html.escape(found.date[:10])}",
        heading=html.escape(found.heading),
        notes="</p><p>".join(map(html.escape, notes)),
        plots="\n".join(_plots(found, compared)),
        columns="".join(f"<th>{name}</th>" for name in _HEADINGS),
        rows="\n".join(_table_row(row, compared.get(row.key)) for row in found.rows),
    )
    try:
        path.write_text(page)
    except OSError as error:
        raise BenchmarkError(f"The report cannot be written to {str(path)!r}: {error}.") from error


def _table_row(row: "Row", comparison: "Comparison | None") -> str:
    share = "not known" if row.roofline_share is None else f"{row.roofline_share:.0%} of {row.denominator}"
    change = "" if comparison is None or comparison.change is None else f"{comparison.change - 1:+.1%}"
    verdict = comparison.verdict if comparison is not None else ""
    numbers = (
        _time(row.timing.median_s),
        f"{row.timing.spread:.0%}",
        _time(row.timing.median_cpu_s),
        _time(row.reference_timing.median_s),
        f"{row.ratio:.2f}",
        share,
        f"{change} {verdict}".strip(),
    )
    texts = "".join(f"<td>{html.escape(text)}</td>" for text in (row.title, row.ran))
    cells = "".join(f'<td class="number">{html.escape(text)}</td>' for text in numbers)
    return f'<tr class="{verdict.replace(" ", "-")}">{texts}{cells}</tr>'


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _plots(found: "Results", compared: "Mapping[tuple[str, ...], Comparison]") -> list[str]:
    """Plots, per call, the time over the reference's and the share of the roofline."""
    rows = list(reversed(found.rows))
    labels = [row.title for row in rows]
    befores = [compared[row.key].before if row.key in compared else None for row in rows]
    baseline = [math.nan if before is None else before.ratio for before in befores]
    shares = [math.nan if row.roofline_share is None else 100 * row.roofline_share for row in rows]

    def ratios(axes: Any) -> None:
        intervals = [row.timing.ratio_to(row.reference_timing) for row in rows]
        lows = [row.ratio - max(each.low, min(row.ratios)) for row, each in zip(rows, intervals, strict=True)]
        highs = [min(each.high, max(row.ratios)) - row.ratio for row, each in zip(rows, intervals, strict=True)]
        places = range(len(rows))
        axes.errorbar([row.ratio for row in rows], places, xerr=[lows, highs], fmt="o", markersize=4, label="this run")
        if any(not math.isnan(value) for value in baseline):
            axes.plot(baseline, places, "x", color="gray", markersize=5, label="baseline")
            axes.legend()
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="both", labelsize=8)
        axes.set_xlabel("time over the reference's, with its 95% interval, of few rounds with their range")

    def roofline(axes: Any) -> None:
        axes.barh(range(len(rows)), shares)
        axes.axvline(100, color="gray", linewidth=0.8)
        axes.set_xlabel("share of the roofline in %")

    return [
        _figure("Time over the reference's", labels, ratios),
        _figure("Share of the roofline", labels, roofline),
    ]


def _figure(title: str, labels: Sequence[str], draw: Any) -> str:
    # Avoids pyplot, which needs a window system and global state. Imported by name, because types are also checked in
    # an environment without matplotlib.
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(10, 1.5 + 0.24 * len(labels)), layout="constrained"
    )
    axes = figure.add_subplot()
    draw(axes)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(-0.7, len(labels) - 0.3)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_title(title)
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return svg.getvalue()[svg.getvalue().index("<svg") :]
