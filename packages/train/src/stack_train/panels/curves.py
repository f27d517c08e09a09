"""The panel `curves`: a chart of the loss, and a small chart of each other metric in `metrics.jsonl`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stack_core.abi.reports import Fragment
from stack_core.report.fields import title
from stack_core.report.markup import element
from stack_core.report.plots import Chart, Series
from stack_core.report.svg import draw
from stack_train.panels.records import number_in, records

__all__ = ["curves", "curves_of"]

_TITLES: Final = {"grad_norm": "gradient norm", "mfu": "MFU", "duration_s": "time of a step"}
_FROM_ZERO: Final = ("_s", "mfu", "learning_rate", "weight")
_SMOOTH_FROM_POINTS: Final = 200

Points = list[tuple[float, float]]


def curves(directory: Path, config: Mapping[str, Any]) -> Fragment | None:
    """Draws the training and validation curves of each metric; returns None before the first step."""
    return curves_of(records(directory / "metrics.jsonl"))


def curves_of(found: Sequence[Mapping[str, Any]]) -> Fragment | None:
    """Draws the curves of records with a `kind`, "train" or "evaluation", a `step` and metrics."""
    train = [record for record in found if record.get("kind") == "train"]
    held_out = [record for record in found if record.get("kind") == "evaluation"]
    if not found:
        return None
    charts = {name: _chart(name, _points(train, name), _points(held_out, name)) for name in _names(found)}
    charts = {name: chart for name, chart in charts.items() if chart.series}
    loss = charts.pop("loss", None)
    steps = 2 * _half_width(_points(train, "loss")) + 1
    note = f"Lines are means over {steps} steps, drawn over a faint one of every step." if steps > 1 else None
    body = element(
        "div",
        None if note is None else element("p", note, class_="help"),
        None if loss is None else draw(loss),
        element("div", *map(draw, charts.values()), class_="small plots"),
    )
    return Fragment("curves", body)


def _names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the metric names: the standard metrics first, then the objective's in alphabetical order."""
    names = sorted({name for record in found for name in record} - {"kind", "step"})
    rates = [name for name in names if name.endswith("_per_s")]
    first = ["loss", "learning_rate", "grad_norm", *rates, "mfu", "duration_s"]
    return [name for name in first if name in names] + [name for name in names if name not in first]


def _points(found: Sequence[Mapping[str, Any]], name: str) -> Points:
    numbers = ((record["step"], number_in(record, name)) for record in found)
    return [(float(step), value) for step, value in numbers if value is not None and math.isfinite(value)]


def _chart(name: str, train: Points, validation: Points) -> Chart:
    # The duration of an evaluation is not comparable with the duration of a step.
    validation = [] if name == "duration_s" else validation
    series = [_series("training", train), _series("held out", validation)]
    half = _half_width(train)
    if half and name != "learning_rate":
        series = [Series("training", "line", _smoothed(train, half)), series[1], Series("", "faint", train)]
    shown = [each for each in series if each.points]
    heading, size = _TITLES.get(name, title(name)), "whole" if name == "loss" else "small"
    return Chart(heading, "step", name, shown, from_zero=name.endswith(_FROM_ZERO), size=size)


def _series(name: str, points: Points) -> Series:
    """Builds a line, or a dot for a single point, which a line would not show."""
    return Series(name, "line" if len(points) > 1 else "dots", points)


def _half_width(points: Points) -> int:
    """Returns the half width of the moving average in points; 0 for short series."""
    return len(points) // 100 if len(points) >= _SMOOTH_FROM_POINTS else 0


def _smoothed(points: Points, half: int) -> Points:
    """Computes the moving average over `half` points on each side, with truncated windows at both ends."""
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    spans = ((max(at - half, 0), min(at + half + 1, len(points))) for at in range(len(points)))
    means = ((sums[end] - sums[start]) / (end - start) for start, end in spans)
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
