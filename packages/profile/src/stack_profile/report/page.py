"""HTML report of a trace: an interactive view, and facts, plots, table and notes of each registered analysis.

The sections need no JavaScript. The script of the interactive view, `page.js`, is built from `packages/profile/web`.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from stack_core.abi.errors import StackError
from stack_core.abi.plugins import registries
from stack_core.report.document import document, key_values
from stack_core.report.document import framed as in_frame
from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, breakable, element
from stack_core.report.plots import Bars, Chart, Plot
from stack_core.report.svg import draw
from stack_profile.answer import Answer
from stack_profile.report.encoding import pack, pack_json
from stack_profile.report.events import EVENTS, Recorded, recorded_events
from stack_profile.report.links import Links
from stack_profile.report.sources import sources
from stack_profile.report.views import views
from stack_profile.traces.short_paths import ShortPaths, short_paths
from stack_profile.traces.trace import Trace

__all__ = ["Section", "Writer", "describe", "framed", "page", "partial", "resource", "script_data", "sections"]

_FIRST: Final = ("overview", "advice", "ops", "timeline", "roofline", "memory", "communication")
_LONGEST_TEXT: Final = 240


@dataclass(frozen=True)
class Section:
    """An analysis in the report.

    Attributes:
      name: name of the analysis.
      help: help line of the analysis.
      answer: result of the analysis, or None after a failure.
      failure: error message of a failed analysis.
    """

    name: str
    help: str
    answer: Answer[Any] | None
    failure: str = ""


def sections(trace: Trace) -> Iterator[Section]:
    """Runs every registered analysis with its default options, this package's first, in reading order."""
    entries = {entry.name: entry for entry in registries.analyses.entries()}
    for name in (*(each for each in _FIRST if each in entries), *(each for each in entries if each not in _FIRST)):
        help_ = entries[name].details.get("help", "")
        try:
            yield Section(name, help_, registries.analyses[name](trace))
        except StackError as error:
            yield Section(name, help_, None, str(error))
        except Exception as error:  # A third-party analysis may raise anything; its section shows the error.
            yield Section(name, help_, None, f"{type(error).__name__}: {error}")


def page(trace: Trace, found: Sequence[Section], *, limit: int = 200, events: int = EVENTS) -> str:
    """Builds the HTML document, whose content security policy forbids external resources and foreign scripts.

    Args:
      trace: the trace.
      found: sections of the report.
      limit: maximum number of rows per table, 0 for all.
      events: maximum number of events in the interactive view.
    """
    paths = short_paths(trace)
    recorded, failure = _recorded(trace, paths, events)
    links = Links(recorded, paths)
    writer = Writer(paths.text, links.address, limit)
    names = (element("a", _name(section), href=f"#{section.name}", class_=_failed(section)) for section in found)
    header = element(
        "header",
        element("h1", "Profile"),
        element("p", breakable(trace.source), class_="source"),
        describe(trace.about),
    )
    return document(
        f"Profile of {trace.source}",
        header,
        partial(trace.problems),
        element("nav", element("a", "events", href="#instrument"), *names),
        element("p", f"The timeline failed. {failure}", class_="failure", role="alert") if failure else None,
        # Filled and shown by the script.
        element("div", id="instrument", hidden="", role="region", aria_label="Events"),
        element("main", *map(writer.section, found)),
        script_data(_tables(recorded, trace, paths, links), recorded.columns),
        script=resource("page.js"),
        style=resource("page.css"),
    )


def _recorded(trace: Trace, paths: ShortPaths, limit: int) -> tuple[Recorded, str]:
    """Collects the events, or returns none of them and an error message."""
    try:
        return recorded_events(trace, paths, limit=limit), ""
    except Exception as error:  # A damaged trace may raise anything here; its sections read less of it.
        return Recorded(), f"{type(error).__name__}: {error}"


def resource(name: str) -> str:
    """Returns the text of a file of this package: the script or the style sheet of a page."""
    return resources.files("stack_profile.report").joinpath(name).read_text(encoding="utf-8")


def _tables(recorded: Recorded, trace: Trace, paths: ShortPaths, links: Links) -> dict[str, Any]:
    return {
        "lanes": recorded.lane_table,
        "kinds": recorded.kinds,
        "frames": recorded.frames,
        "stacks": recorded.stacks,
        "sources": sources(recorded.files, trace.about),
        "left_out": recorded.left_out,
        **views(trace, paths, links),
    }


def script_data(tables: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> Markup:
    """Returns the element with the data of the interactive view; base64 keeps its texts from being read as markup."""
    data = json.dumps({"tables": pack_json(tables), "events": pack(columns)})
    return element("script", Markup(data), id="capture", type="application/json")


def describe(about: Mapping[str, Any]) -> Markup:
    """Builds a list of the machine and the program of a capture, from its metadata."""
    known = {key: about[key] for key in _ABOUT if about.get(key) not in (None, "")}
    if "started_at" in known:
        known["started_at"] = str(known["started_at"]).partition(".")[0].replace("T", " ")
    if not isinstance(known.get("command", ""), str):
        known["command"] = shlex.join(known["command"])
    if not known:
        return element("p", "The trace does not describe the machine and program that it was captured from.")
    return key_values({_ABOUT[key]: value for key, value in known.items()})


_ABOUT: Final = {
    "started_at": "captured at, UTC",
    "command": "command",
    "device_kind": "device",
    "devices": "devices",
    "cpu": "CPU",
    "cores": "cores",
    "jax": "JAX",
    "python": "Python",
}


def partial(reasons: Sequence[str]) -> Markup | None:
    """Builds a warning with the reasons why a trace is incomplete; None without any."""
    if not reasons:
        return None
    lines = (element("li", reason) for reason in dict.fromkeys(reasons))
    heading = element("strong", "This trace is partial; the report covers only its readable part.")
    return element("aside", heading, element("ul", *lines), class_="partial", role="alert")


def _name(section: Section) -> str:
    return section.name.replace("_", " ")


def _failed(section: Section) -> str | None:
    return "failed" if section.answer is None else None


def framed(trace: Trace) -> str:
    """Returns the report of a trace as a frame that a notebook can show; the frame loads nothing."""
    return in_frame(page(trace, list(sections(trace))), "Profile")


@dataclass(frozen=True)
class Writer:
    """Formats sections, with short names of files and links from rows to events.

    Attributes:
      text: replaces names of files in a text.
      address: returns the address of a row's events, see `Links.address`.
      limit: maximum number of rows per table, 0 for all.
    """

    text: Callable[[str], str]
    address: Callable[[object, Mapping[str, Any]], str | None]
    limit: int

    def section(self, section: Section) -> Markup:
        heading = element("h2", element("a", _name(section), href=f"#{section.name}"))
        said = element("p", section.help, class_="help") if section.help else None
        if section.answer is None:
            body: Iterable[Markup] = (
                element("p", f"This analysis failed. {section.failure}", class_="failure", role="alert"),
            )
        else:
            body = self._answer(section.answer)
        return element("section", heading, said, *body, id=section.name)

    def _answer(self, answer: Answer[Any]) -> Iterator[Markup]:
        if answer.facts:
            yield key_values({name: self._short(value) for name, value in answer.facts.items()})
        if answer.plots:
            yield element("div", *(draw(self._short_plot(plot)) for plot in answer.plots), class_="plots")
        if answer.rows:
            yield self._table(answer)
        elif not answer.notes:
            yield element("p", "No rows.", class_="empty")
        if answer.notes:
            yield element("ul", *(element("li", self.text(note)) for note in answer.notes), class_="notes")

    def _short(self, value: Any) -> Any:
        return self.text(value) if isinstance(value, str) else value

    def _short_plot(self, plot: Plot) -> Plot:
        text = self.text
        if isinstance(plot, Bars):
            return dataclasses.replace(plot, labels=[text(label) for label in plot.labels])
        if isinstance(plot, Chart):
            series = [dataclasses.replace(each, labels=[text(label) for label in each.labels]) for each in plot.series]
            return dataclasses.replace(plot, series=series)
        return dataclasses.replace(plot, spans=[dataclasses.replace(each, name=text(each.name)) for each in plot.spans])

    def _table(self, answer: Answer[Any]) -> Markup:
        """Formats the first rows as a table, without empty columns, like the terminal."""
        shown = answer.rows[: self.limit or None]
        columns = [name for name in answer.columns if any(getattr(row, name) not in (None, "") for row in shown)]
        # Tuples are of texts, such as the names of operands.
        numeric = {name for name in columns if any(isinstance(getattr(row, name), int | float) for row in shown)}
        kinds = {name: "number" if name in numeric else "text" for name in columns}
        heads = (
            element("th", element("button", title(name), type="button"), class_=kinds[name], scope="col")
            for name in columns
        )
        rows = (self._row(answer, row, kinds) for row in shown)
        table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
        more = len(answer.rows) - len(shown)
        said = (
            f"{len(shown):,} of {len(answer.rows):,} rows; stack profile {answer.name.split()[0]} --csv prints all."
            if more
            else None
        )
        return element("div", table, element("p", said, class_="empty") if said else None, class_="wide")

    def _row(self, answer: Answer[Any], row: object, kinds: Mapping[str, str]) -> Markup:
        """Formats a row; its name, or otherwise its first text or cell, links to the row's events."""
        address = self.address(row, answer.facts)
        texts = [name for name, kind in kinds.items() if kind == "text"]
        linked = next((name for name in ("name", *texts, *kinds) if name in kinds), None) if address else None
        cells = (
            self._cell(name, getattr(row, name), kind, address if name == linked else None)
            for name, kind in kinds.items()
        )
        return element("tr", *cells, data_events=address)

    def _cell(self, name: str, value: object, kind: str, address: str | None) -> Markup:
        """Formats a cell. Numbers keep their exact value in an attribute; long texts are truncated."""
        shown = number(name, self._short(value))
        exact = None
        if kind == "number":
            exact = None if value is None or not isinstance(value, int | float) else repr(float(value))
            text = shown
        else:
            text = breakable(f"{shown[:_LONGEST_TEXT]}…" if len(shown) > _LONGEST_TEXT else shown)
        inside = element("a", text, href=f"#{address}", title="Show its events") if address else text
        return element("td", inside, class_=kind, data_value=exact)
