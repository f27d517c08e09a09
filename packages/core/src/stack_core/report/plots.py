"""Pictures of an answer, as data: what is drawn, and not how.

The name of a field tells the unit of its numbers, as in `stack_core.report.fields`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Bars", "Chart", "Lanes", "Plot", "Series", "Span", "bars"]


@dataclass(frozen=True)
class Bars:
    """Bars beside their labels, the longest first by custom, each of one part or of several after each other.

    Attributes:
      parts: by the field that they are of, a number for each label.
    """

    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Series:
    """Points of a chart, in the order of x.

    Attributes:
      style: "area" is filled down to zero, "steps" a line that keeps its height to the next point, "faint" a line
        behind the first series, in its colour.
      labels: of the points; empty where they have none.
    """

    name: str
    style: Literal["dots", "line", "faint", "area", "steps"]
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """Series over two axes.

    Attributes:
      x, y: the fields that the axes are of.
      log: both axes are logarithmic; points that are not positive are left out.
      from_zero: the axis of heights begins at 0, where that is not logarithmic.
      size: "small" is one of many beside each other, with no room for the names of its axes; "whole" takes the
        width of the page.
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
    """What happened on a lane from `start_s` to `end_s`; spans of one `kind` look alike."""

    lane: str
    start_s: float
    end_s: float
    name: str
    kind: str


@dataclass(frozen=True)
class Lanes:
    """Spans of time on lanes below each other, in the order in which the lanes first occur."""

    title: str
    spans: Sequence[Span]


Plot: TypeAlias = Bars | Chart | Lanes


def bars(title: str, rows: Iterable[Any], *fields: str, label: str = "name", limit: int = 12) -> Bars:
    """The `fields` of the first rows as bars, of the others as one more; rows in which all are 0 are left out.

    Args:
      rows: dataclasses, of which None in a field counts as nothing.
      label: the field of the labels.
    """
    found = [(str(getattr(row, label)), [float(getattr(row, field) or 0.0) for field in fields]) for row in rows]
    found = [(name, values) for name, values in found if any(values)]
    rest = [values for _, values in found[limit:]]
    if rest:
        found[limit:] = [(f"{len(rest)} others", [sum(column) for column in zip(*rest, strict=True)])]
    columns = zip(*(values for _, values in found), strict=True)
    return Bars(title, [name for name, _ in found], dict(zip(fields, columns, strict=False)))
