"""Plots as data, independent of their rendering.

A field's name determines the unit of its numbers, as in `stack_core.report.fields`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Bars", "Chart", "Lanes", "Plot", "Series", "Span", "bars"]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with labels, usually longest first, each with one or several stacked parts.

    Attributes:
      title: heading.
      labels: one label per bar.
      parts: numbers per label, by field.
    """

    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Series:
    """Points of a chart, in ascending x.

    Attributes:
      name: name in the legend.
      style: "area" is filled down to zero; "steps" is a line that stays constant until the next point; "faint" is a
        line behind the first series, in its colour.
      points: (x, y) pairs.
      labels: labels of the points, or empty.
    """

    name: str
    style: Literal["dots", "line", "faint", "area", "steps"]
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """Series over two axes.

    Attributes:
      title: heading.
      x: field of the horizontal axis.
      y: field of the vertical axis.
      series: series to draw, one colour per series.
      log: True for two logarithmic axes, which omit points that are not positive.
      from_zero: True extends a linear vertical axis to 0.
      size: "small" (without axis titles, for several side by side), "normal", or "whole" (page width).
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: bool = False
    from_zero: bool = True
    size: Literal["small", "normal", "whole"] = "normal"


@dataclass(frozen=True)
class Span:
    """An interval on a lane; spans of one `kind` look alike.

    Attributes:
      lane: name of the lane.
      start_s: start in seconds.
      end_s: end in seconds.
      name: label of the span.
      kind: category, which sets the colour.
    """

    lane: str
    start_s: float
    end_s: float
    name: str
    kind: str


@dataclass(frozen=True)
class Lanes:
    """Spans of time on lanes below each other, in the order in which the lanes first occur.

    Attributes:
      title: heading.
      spans: spans of all lanes.
    """

    title: str
    spans: Sequence[Span]


Plot: TypeAlias = Bars | Chart | Lanes


def bars(title: str, rows: Iterable[Any], *fields: str, label: str = "name", limit: int = 12) -> Bars:
    """Builds bars from the `fields` of the first rows, and one bar for the sum of the rest; rows of zeros are omitted.

    Args:
      rows: dataclasses; None in a field counts as 0.
      label: field with the labels.
      limit: maximum number of bars before the rest.
    """
    found = [(str(getattr(row, label)), [float(getattr(row, field) or 0.0) for field in fields]) for row in rows]
    found = [(name, values) for name, values in found if any(values)]
    rest = [values for _, values in found[limit:]]
    if rest:
        found[limit:] = [(f"{len(rest)} others", [sum(column) for column in zip(*rest, strict=True)])]
    columns = zip(*(values for _, values in found), strict=True)
    return Bars(title, [name for name, _ in found], dict(zip(fields, columns, strict=False)))
