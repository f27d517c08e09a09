"""Rendering of plots as SVG: bars, charts over two axes, and lanes of time. The style sheet sets colours and fonts."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, breakable, element
from stack_core.report.plots import Bars, Chart, Lanes, Plot, Series, Span

__all__ = ["draw"]

_WIDTH, _RIGHT, _TOP = 600.0, 24.0, 10.0
_COLORS: Final = 8
_MOST_POINTS: Final = 1500
_MOST_SPANS: Final = 1500
_MOST_LANES: Final = 12
_LANE: Final = 20.0
_LANE_NAMES: Final = 150.0


@dataclass(frozen=True)
class _Frame:
    """The size of a chart, with the margins left of and below the axes."""

    width: float
    height: float
    left: float
    foot: float


_FRAMES: Final = {
    "small": _Frame(380.0, 170.0, 56.0, 24.0),
    "normal": _Frame(_WIDTH, 250.0, 78.0, 42.0),
    "whole": _Frame(1180.0, 300.0, 78.0, 42.0),
}


def draw(plot: Plot) -> Markup:
    """Renders a figure with the plot, its title and its legend; a sentence replaces an empty plot."""
    match plot:
        case Bars():
            kinds, body = [title(name) if any(values) else "" for name, values in plot.parts.items()], _bars(plot)
        case Chart():
            kinds, body = [series.name for series in plot.series], _chart(plot)
        case Lanes():
            kinds, body = _kinds(plot.spans), _lanes(plot)
    body = body or element("p", "Nothing to draw: no value is known, or all are 0.", class_="empty")
    return element("figure", element("figcaption", plot.title), _legend(kinds), body)


def _legend(kinds: Sequence[str]) -> Markup | None:
    """Builds the legend of the colours; a kind without a name has a colour but no entry."""
    shown = [(place, kind) for place, kind in enumerate(kinds) if kind]
    if len(shown) < 2:
        return None
    entries = (element("span", _swatch(place), kind, class_="entry") for place, kind in shown)
    return element("div", *entries, class_="legend")


def _swatch(place: int) -> Markup:
    box = element("rect", width=10, height=10, rx=2, class_=_color(place))
    return element("svg", box, class_="swatch", viewBox="0 0 10 10", aria_hidden="true")


def _color(place: int) -> str:
    return f"c{place % _COLORS}"


def _bars(plot: Bars) -> Markup | None:
    """Builds the rows of a grid: texts keep their size and wrap on a narrow screen; only the bars stretch."""
    totals = [math.fsum(column) for column in zip(*plot.parts.values(), strict=True)]
    largest = max(totals, default=0.0)
    if not largest > 0:
        return None
    field = next(iter(plot.parts))
    cells: list[Markup] = []
    for place, (label, total) in enumerate(zip(plot.labels, totals, strict=True)):
        parts = [(name, values[place]) for name, values in plot.parts.items()]
        bar = element(
            "svg", *_parts(parts, largest), class_="bar", role="img", aria_label=f"{label}: {number(field, total)}"
        )
        cells += [
            element("span", breakable(_short(label, 60) or "(none)"), class_="label", title=label),
            bar,
            element("span", number(field, total), class_="value"),
        ]
    return element("div", *cells, class_="bars")


def _parts(parts: Sequence[tuple[str, float]], largest: float) -> Iterator[Markup]:
    at = 0.0
    for place, (name, value) in enumerate(parts):
        if value > 0:
            width = 100 * value / largest
            said = element("title", f"{title(name)}: {number(name, value)}")
            yield element("rect", said, x=f"{at:.2f}%", width=f"{width:.2f}%", height="100%", class_=_color(place))
            at += width


@dataclass(frozen=True)
class _Axis:
    """A map from values to positions along one axis; `low < high`, and `whole` if only integers are meaningful."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    whole: bool = False

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool) -> "_Axis":
        low, high = min(values), max(values)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
            return cls(low, high if high > low else low * 10, start, end, log)
        low = min(low, 0.0) if from_zero else low
        whole = not from_zero and all(map(float.is_integer, values))
        return cls(low, high if high > low else low + (abs(low) or 1.0), start, end, log, whole)

    def place(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.log else float
        part = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + part * (self.end - self.start)

    def ticks(self, field: str) -> list[float]:
        """Returns round tick values of a field; bytes are round in units of 1024."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1, -(-(last - first) // 6) or 1)]
        unit = 1024.0 ** int(math.log(self.high, 1024)) if field.endswith("_bytes") and self.high > 1 else 1.0
        low, high = self.low / unit, self.high / unit
        step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step *= next(each for each in (1, 2, 5, 10) if (high - low) / (each * step) <= 6)
        step = max(step, 1.0) if self.whole else step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [unit * step * place for place in range(first, last + 1)]

    def labels(self, field: str, ticks: Sequence[float]) -> list[str]:
        """Returns the tick labels; numbers of more than three digits get as many digits as needed to differ."""
        said = [number(field, tick) for tick in ticks]
        step = min((b - a for a, b in itertools.pairwise(ticks)), default=0.0)
        digits = -math.floor(math.log10(step) + 1e-9) if step > 0 else 0
        if self.log or digits <= 0 or max(map(abs, ticks)) < 1000 * 10.0**-digits:
            return said
        return [f"{tick:,.{digits}f}" for tick in ticks]


def _chart(plot: Chart) -> Markup | None:
    drawn = [_drawable(series, log=plot.log) for series in plot.series]
    points = [point for _, found in drawn for point in found]
    if not points:
        return None
    frame = _FRAMES[plot.size]
    x = _Axis.over([each[0] for each in points], frame.left, frame.width - _RIGHT, log=plot.log, from_zero=False)
    heights, bottom = [each[1] for each in points], frame.height - frame.foot
    y = _Axis.over(heights, bottom, _TOP, log=plot.log, from_zero=plot.from_zero)
    behind = sorted(enumerate(drawn), key=lambda each: each[1][0].style != "faint")
    shapes = [shape for place, (series, found) in behind for shape in _series(series, found, place, plot, x, y)]
    # Keeps the text readable: narrow screens scroll the drawing instead of shrinking text.
    box = f"0 0 {frame.width:g} {frame.height:g}"
    drawing = element("svg", *_grid(plot, x, y), *shapes, viewBox=box, role="img", aria_label=plot.title)
    return element("div", drawing, class_=f"{plot.size} wide")


def _drawable(series: Series, *, log: bool) -> tuple[Series, Sequence[tuple[float, float]]]:
    """Drops points without a logarithm, and thins a series to the drawable resolution."""
    rows = [
        (point, label)
        for point, label in zip(series.points, series.labels or [""] * len(series.points), strict=True)
        if all(map(math.isfinite, point)) and (not log or min(point) > 0)
    ]
    if len(rows) > _MOST_POINTS and series.style in ("line", "faint"):  # keep the minimum and maximum of each group
        size = -(-2 * len(rows) // _MOST_POINTS)
        groups = [sorted(rows[at : at + size], key=lambda row: row[0][1]) for at in range(0, len(rows), size)]
        rows = [row for group in groups for row in sorted({group[0], group[-1]})]
    elif len(rows) > _MOST_POINTS:
        size = -(-len(rows) // _MOST_POINTS)
        rows = [max(rows[at : at + size], key=lambda row: row[0][1]) for at in range(0, len(rows), size)]
    thinned = Series(series.name, series.style, [point for point, _ in rows], [label for _, label in rows])
    return thinned, thinned.points


def _grid(plot: Chart, x: _Axis, y: _Axis) -> Iterator[Markup]:
    left, right, bottom = x.start, x.end, y.start
    ticks = y.ticks(plot.y)
    for tick, said in zip(ticks, y.labels(plot.y, ticks), strict=True):
        at = y.place(tick)
        yield element("line", x1=left, x2=right, y1=at, y2=at, class_="grid")
        yield element("text", said, x=left - 6, y=at + 4, text_anchor="end")
    for tick in x.ticks(plot.x):
        at = x.place(tick)
        yield element("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="grid")
        yield element("text", number(plot.x, tick), x=at, y=bottom + 17, text_anchor="middle")
    if plot.size == "small":
        return
    yield element("text", title(plot.x), x=(left + right) / 2, y=bottom + 36, text_anchor="middle", class_="axis")
    turned = f"translate(12 {(_TOP + bottom) / 2:.0f}) rotate(-90)"
    yield element("text", title(plot.y), x=0.0, y=0.0, class_="axis", text_anchor="middle", transform=turned)


def _series(
    series: Series, points: Sequence[tuple[float, float]], place: int, plot: Chart, x: _Axis, y: _Axis
) -> Iterator[Markup]:
    places = [(x.place(each), y.place(height)) for each, height in points]
    if series.style == "dots":
        for (left, top), point, label in zip(places, points, series.labels, strict=True):
            said = f"{label}\n{title(plot.x)}: {number(plot.x, point[0])}, {title(plot.y)}: {number(plot.y, point[1])}"
            yield element("circle", element("title", said.strip()), cx=left, cy=top, r=3.5, class_=_color(place))
        return
    if series.style in ("area", "steps"):
        places = list(_stepped(places))
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
    if series.style == "area" and places:
        foot = y.place(max(y.low, 0.0))
        path = f"{places[0][0]:.1f},{foot:.1f} {path} {places[-1][0]:.1f},{foot:.1f}"
        yield element("polygon", points=path, class_=f"area {_color(place)}")
    elif series.style == "faint":
        yield element("polyline", points=path, class_=f"faint curve {_color(0)}")
    else:
        yield element("polyline", points=path, class_=f"curve {_color(place)}")


def _stepped(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    height: float | None = None
    for left, top in places:
        if height is not None:
            yield left, height
        yield left, top
        height = top


def _kinds(spans: Iterable[Span]) -> list[str]:
    """Returns the kinds of spans by decreasing total time; kinds beyond the number of colours become "others"."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.kind] = sums.get(span.kind, 0.0) + span.end_s - span.start_s
    kinds = sorted(sums, key=lambda kind: (-sums[kind], kind))
    return kinds if len(kinds) <= _COLORS else [*kinds[: _COLORS - 1], "others"]


def _lanes(plot: Lanes) -> Markup | None:
    took: dict[str, float] = {}
    for span in plot.spans:
        took[span.lane] = took.get(span.lane, 0.0) + span.end_s - span.start_s
    busiest = set(sorted(took, key=lambda lane: -took[lane])[:_MOST_LANES])
    lanes = {lane: place for place, lane in enumerate(lane for lane in took if lane in busiest)}
    longest = sorted(plot.spans, key=lambda span: span.start_s - span.end_s)
    spans = [span for span in longest if span.lane in lanes][:_MOST_SPANS]
    if not spans:
        return None
    kinds = {kind: place for place, kind in enumerate(_kinds(plot.spans))}
    origin_s = min(span.start_s for span in spans)
    x = _Axis(0.0, max(span.end_s for span in spans) - origin_s or 1.0, _LANE_NAMES, _WIDTH - _RIGHT, log=False)
    bottom = _TOP + _LANE * len(lanes)
    others = len(kinds) - 1
    shapes = [_span(span, origin_s, x, _TOP + _LANE * lanes[span.lane], kinds.get(span.kind, others)) for span in spans]
    names = [
        element(
            "text",
            _short(lane),
            element("title", lane),
            x=_LANE_NAMES - 6,
            y=_TOP + _LANE * (place + 0.7),
            text_anchor="end",
        )
        for lane, place in lanes.items()
    ]
    axis = [
        element("text", number("_s", tick), x=x.place(tick), y=bottom + 17, text_anchor="middle")
        for tick in x.ticks("_s")
    ]
    drawing = element(
        "svg", *names, *axis, *shapes, viewBox=f"0 0 {_WIDTH:g} {bottom + 24:g}", role="img", aria_label=plot.title
    )
    of_lanes = f"on the busiest {len(lanes)} of {len(took)} lanes"
    cut = f"Shown are the longest {len(spans):,} of {len(plot.spans):,}, {of_lanes}."
    said = element("p", cut, class_="empty") if len(spans) < len(plot.spans) else None
    return element("div", drawing, said, class_="wide")


def _span(span: Span, origin_s: float, x: _Axis, top: float, color: int) -> Markup:
    left, right = x.place(span.start_s - origin_s), x.place(span.end_s - origin_s)
    said = element("title", f"{span.name}\n{span.kind}, {number('_s', span.end_s - span.start_s)}")
    return element(
        "rect", said, x=left, y=top + 2, width=max(right - left, 0.5), height=_LANE - 4, class_=_color(color)
    )


def _short(name: str, limit: int = 22) -> str:
    """Truncates a name at its start: the end of a path or layer name is more specific."""
    return name if len(name) <= limit else f"…{name[1 - limit :]}"
