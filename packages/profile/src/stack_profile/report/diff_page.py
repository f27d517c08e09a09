"""HTML page of a comparison: the changes of a step by line, operation, layer, module and category, and both timelines.

The first capture of each side is on the timeline. Its groups of lanes, files and lines start with "before: " or
"after: ". The script aligns the starts of the chosen step, see `web/src/sides.ts`.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from stack_core.report.document import document, key_values
from stack_core.report.markup import Markup, breakable, element
from stack_profile.answer import Answer
from stack_profile.comparisons.comparison import Comparison, DiffGrouping, Group
from stack_profile.comparisons.diff import MIN_CHANGE, DiffRow, compared, ranked
from stack_profile.comparisons.samples import Side
from stack_profile.report.events import Recorded, recorded_events
from stack_profile.report.flows import dispatches
from stack_profile.report.lanes import Lane
from stack_profile.report.page import Section, Writer, describe, partial, resource, script_data
from stack_profile.report.sources import sources
from stack_profile.traces.operations import Operation
from stack_profile.traces.short_paths import ShortPaths, short_paths
from stack_profile.traces.trace import Trace

__all__ = ["diff_page"]

_GROUPINGS: Final[tuple[DiffGrouping, ...]] = ("line", "op", "layer", "module", "category")
_NAMES: Final = ("before", "after")
_FACTS: Final = (
    "steps",
    "captures",
    "before_step_s",
    "after_step_s",
    "step_change_s",
    "step_change_low_s",
    "step_change_high_s",
    "busy_change_s",
    "idle_change_s",
    "appeared_s",
    "disappeared_s",
)


def diff_page(
    before: Sequence[Trace],
    after: Sequence[Trace],
    *,
    min_change: float = MIN_CHANGE,
    limit: int = 200,
    events: int = 1_000_000,
    gate: Answer[Any] | None = None,
) -> str:
    """Builds the page.

    Args:
      before, after: captures of one program each, as of `diff`.
      min_change: minimum change of a labelled row, as a share of its time before.
      limit: maximum number of rows of the tables below the interactive view, 0 for all.
      events: maximum number of events of both timelines together.
      gate: answer of `gate`, which the page shows first.

    Raises:
      ProfileError: a side lacks captures.
    """
    comparison, notes = compared(before, after)
    sides = [_Side(name, traces[0], events // 2) for name, traces in zip(_NAMES, (before, after), strict=True)]
    paths = _Paths(sides)
    tables = [_Table(by, comparison, notes, min_change, paths) for by in _GROUPINGS] if comparison else []
    body = []
    if gate is not None:
        writer = Writer(paths.text, lambda row, totals: None, limit)
        body.append(writer.section(Section("gate", _GATE, gate)))
    for table in tables:
        writer = Writer(paths.text, table.address, limit)
        body.append(writer.section(Section(f"by_{table.by}", _BY, table.answer)))
    facts = {name: value for name, value in tables[0].answer.facts.items() if name in _FACTS} if tables else {}
    captures = (element("div", element("h2", side.name), _capture(side.trace), class_="side") for side in sides)
    names = ["gate"] * (gate is not None) + [f"by_{table.by}" for table in tables]
    return document(
        f"{before[0].source} and {after[0].source}",
        element("header", element("h1", "Changes between captures")),
        element("div", *captures, class_="sides"),
        partial([problem for trace in (*before, *after) for problem in trace.problems]),
        element("p", _SEVERAL, class_="help") if len(before) + len(after) > 2 else None,
        element("div", key_values(facts), class_="sides")
        if facts
        else element("p", notes[0], class_="failure", role="alert"),
        element("nav", element("a", "events", href="#instrument"), *(_link(name) for name in names)),
        element("div", id="instrument", hidden="", role="region", aria_label="Events"),
        element("main", *body),
        _data(sides, tables),
        script=resource("page.js"),
        style=resource("page.css"),
    )


_SEVERAL: Final = "The tables are of all captures, the timeline has the first of each side."
_GATE: Final = "The metrics of the gate, with the parts that grew most."
_BY: Final = "Seconds of a step before and after, and the significance of the change."


def _link(name: str) -> Markup:
    return element("a", name.replace("_", " "), href=f"#{name}")


def _capture(trace: Trace) -> Markup:
    return element("div", element("p", breakable(trace.source), class_="source"), describe(trace.about))


class _Side:
    """The first capture of a side, with its events under the side's name."""

    def __init__(self, name: str, trace: Trace, events: int) -> None:
        self.name, self.trace, self.paths = name, trace, short_paths(trace)
        self.recorded = recorded_events(trace, self.paths, limit=events)
        for kind in self.recorded.kinds:
            kind |= {key: self.named(kind[key]) for key in ("line", "file") if kind.get(key)}

    def named(self, file: str) -> str:
        """Prefixes a file or line of the user with the side's name."""
        return f"{self.name}: {file}"

    @property
    def frames(self) -> list[tuple[str, int, str, bool]]:
        return [
            (self.named(file) if is_users else file, line, function, is_users)
            for file, line, function, is_users in self.recorded.frames
        ]

    @property
    def sources(self) -> dict[str, Any]:
        files = sources(self.recorded.files, self.trace.about)
        return {self.named(name): source for name, source in files.items()}

    @property
    def steps(self) -> Lane | None:
        """The steps of the first device that has any."""
        return next((lane for lane in self.recorded.lanes if lane.type == "steps"), None)


class _Paths:
    """Short names of the files of both sides."""

    def __init__(self, sides: Sequence[_Side]) -> None:
        self._paths: Sequence[ShortPaths] = [side.paths for side in sides]
        self._named = [side.named for side in sides]

    def text(self, text: str) -> str:
        for paths in self._paths:
            text = paths.text(text)
        return text

    def place(self, side: int, operation: Operation) -> str:
        """Returns the own line of an operation as its side names it, or "" without one."""
        line = operation.instruction.source() if operation.instruction else None
        return "" if line is None else self._named[side](f"{self._paths[side].frame(line)}:{line.line}")


@dataclass(frozen=True)
class _Change:
    """A row of a table.

    Attributes:
      row: the row.
      label: name of the row's events, of the filter `change` in the address; "" without any.
      operations: "program: name" of the operations of each side.
      places: own line of the heaviest operation of each side, or "".
    """

    row: DiffRow
    label: str
    operations: tuple[frozenset[str], frozenset[str]]
    places: tuple[str, str]


class _Table:
    """The changes by one grouping."""

    def __init__(
        self, by: DiffGrouping, comparison: Comparison, notes: Sequence[str], min_change: float, paths: _Paths
    ) -> None:
        self.by, self.text = by, paths.text
        self.answer, groups = ranked(comparison, notes, by=by, min_change=min_change)
        short = [paths.text(row.name) for row in self.answer.rows]
        counts = collections.Counter(short)
        # Files of two folders may have one short name.
        names = [each if counts[each] == 1 else row.name for each, row in zip(short, self.answer.rows, strict=True)]
        self.changes = [
            _Change(row, f"{by} {name or '(none)'}" if group else "", *_parts(comparison, group, paths))
            for row, name, group in zip(self.answer.rows, names, groups, strict=True)
        ]
        self._labels = {id(change.row): change.label for change in self.changes}

    def address(self, row: object, totals: Mapping[str, Any]) -> str | None:
        label = self._labels.get(id(row))
        return f"change={quote(label, safe='')}&tab=changes&changes={self.by}" if label else None


def _parts(
    comparison: Comparison, group: Group | None, paths: _Paths
) -> tuple[tuple[frozenset[str], frozenset[str]], tuple[str, str]]:
    """Returns the operations of a group on each side, and the lines of the heaviest ones."""
    if group is None:
        return (frozenset(), frozenset()), ("", "")
    found: list[frozenset[str]] = []
    places: list[str] = []
    for index, (side, members) in enumerate(zip(comparison.sides, (group.before, group.after), strict=True)):
        found.append(frozenset(_named(side.operations[member]) for member in members))
        heaviest = max(members, key=lambda member: _self_s(side, member), default=None)
        places.append("" if heaviest is None else paths.place(index, side.operations[heaviest]))
    return (found[0], found[1]), (places[0], places[1])


def _self_s(side: Side, column: int) -> float:
    return sum(samples[:, column].mean() for samples in side.self_s)


def _named(operation: Operation) -> str:
    return f"{operation.module}: {operation.name}"


def _data(sides: Sequence[_Side], tables: Sequence[_Table]) -> Markup:
    lanes, recorded = _merged(sides)
    return script_data(
        {
            "lanes": lanes,
            "kinds": _kinds(sides, tables),
            "frames": [frame for side in sides for frame in side.frames],
            "stacks": _stacks(sides),
            "sources": {name: source for side in sides for name, source in side.sources.items()},
            "left_out": sum(side.recorded.left_out for side in sides),
            "failures": {},
            "changes": {
                "tables": {table.by: [_row(change, table) for change in table.changes] for table in tables},
                "notes": tables[0].answer.notes if tables else (),
                "step": _typical_step(sides),
            },
        },
        recorded.columns,
    )


def _row(change: _Change, table: _Table) -> dict[str, Any]:
    values = dataclasses.asdict(change.row)
    texts = {name: table.text(value) for name, value in values.items() if isinstance(value, str)}
    return {**values, **texts, "label": change.label, "places": change.places}


def _kinds(sides: Sequence[_Side], tables: Sequence[_Table]) -> list[dict[str, Any]]:
    """Returns the kinds of both sides; operations have the labels of their changes, steps the names of their pairs."""
    labels: list[dict[str, list[str]]] = [{}, {}]
    for table in tables:
        for change in table.changes:
            for found, names in zip(labels, change.operations, strict=True):
                for name in names:
                    found.setdefault(name, []).append(change.label)
    pairs = _pairs(sides)
    kinds = []
    stacks = 0
    for index, side in enumerate(sides):
        for kind in side.recorded.kinds:
            changes = (
                labels[index].get(f"{kind.get('module')}: {kind['name']}") if kind["type"] == "operation" else None
            )
            added: dict[str, Any] = {"changes": changes} if changes else {}
            if "stack" in kind:
                added["stack"] = kind["stack"] + stacks
            if index and kind["type"] == "step" and kind["name"] in pairs:
                added["pair"] = pairs[kind["name"]]
            kinds.append({**kind, **added})
        stacks += len(side.recorded.stacks)
    return kinds


def _stacks(sides: Sequence[_Side]) -> list[list[int]]:
    first = len(sides[0].recorded.frames)
    return [*sides[0].recorded.stacks, *([first + each for each in stack] for stack in sides[1].recorded.stacks)]


def _step_names(side: _Side) -> list[str]:
    lane = side.steps
    return [] if lane is None else [side.recorded.kinds[kind]["name"] for kind in lane.kind.tolist()]


def _pairs(sides: Sequence[_Side]) -> dict[str, str]:
    """Pairs the steps by number if any is on both sides, otherwise in order; returns names before by names after."""
    before, after = map(_step_names, sides)
    shared = set(before) & set(after)
    return {name: name for name in shared} if shared else dict(zip(after, before, strict=False))


def _typical_step(sides: Sequence[_Side]) -> str:
    """Returns the number of the step before with the median duration, of the steps that have a pair."""
    lane, pairs = sides[0].steps, set(_pairs(sides).values())
    if lane is None:
        return ""
    names = _step_names(sides[0])
    lasting = sorted(
        (duration, name) for duration, name in zip(lane.duration_ps.tolist(), names, strict=True) if name in pairs
    )
    return lasting[(len(lasting) - 1) // 2][1].removeprefix("step ") if lasting else ""


def _merged(sides: Sequence[_Side]) -> tuple[list[dict[str, Any]], Recorded]:
    """Joins the lanes, each group of one side above the same group of the other."""
    groups: list[list[tuple[int, list[Lane]]]] = []
    first_kind = 0
    starts = [0 if side.steps is None else int(side.steps.start_ps[0]) for side in sides]
    for index, side in enumerate(sides):
        shift = starts[0] - starts[index]
        lanes = [
            dataclasses.replace(
                lane,
                group=f"{side.name}: {lane.group}",
                start_ps=lane.start_ps + shift,
                kind=lane.kind + first_kind,
                process=index * _MOST_PROCESSES + lane.process,
            )
            for lane in side.recorded.lanes
        ]
        first_kind += len(side.recorded.kinds)
        groups.append([(index, list(each)) for _, each in itertools.groupby(lanes, key=lambda lane: lane.group)])
    ordered = [each for pair in itertools.zip_longest(*groups) for each in pair if each is not None]
    merged = Recorded(lanes=[lane for _, lanes in ordered for lane in lanes])
    merged.dispatched_by = dispatches(merged.lanes)
    side_of = [index for index, lanes in ordered for _ in lanes]
    return [{**each, "side": side} for each, side in zip(merged.lane_table, side_of, strict=True)], merged


_MOST_PROCESSES: Final = 1 << 20
