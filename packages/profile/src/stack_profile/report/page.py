"""HTML report of a trace, with a section of facts, plots, table and notes for each registered analysis."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from stack_core.abi.errors import StackError
from stack_core.abi.plugins import registries
from stack_core.report.document import document, key_values
from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, breakable, element
from stack_core.report.svg import draw
from stack_profile.answer import Answer
from stack_profile.traces.trace import Trace

__all__ = ["Section", "page", "sections"]

_FIRST: Final = ("overview", "ops", "timeline", "roofline", "memory", "communication")
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


def page(trace: Trace, found: Sequence[Section], *, limit: int = 200) -> str:
    """Builds the HTML document, whose content security policy forbids external resources and foreign scripts.

    Args:
      trace: the trace.
      found: sections of the report.
      limit: maximum number of rows per table, 0 for all.
    """
    links = (element("a", _name(section), href=f"#{section.name}", class_=_failed(section)) for section in found)
    header = element(
        "header",
        element("h1", "Profile"),
        element("p", breakable(trace.source), class_="source"),
        _about(trace.about),
    )
    return document(
        f"Profile of {trace.source}",
        header,
        _partial(trace.problems),
        element("nav", *links),
        element("main", *(_section(section, limit) for section in found)),
        script=resources.files("stack_profile.report").joinpath("sort.js").read_text(encoding="utf-8"),
    )


def _about(about: Mapping[str, Any]) -> Markup:
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


def _partial(reasons: Sequence[str]) -> Markup | None:
    if not reasons:
        return None
    lines = (element("li", reason) for reason in dict.fromkeys(reasons))
    heading = element("strong", "This trace is partial; the report covers only its readable part.")
    return element("aside", heading, element("ul", *lines), class_="partial", role="alert")


def _name(section: Section) -> str:
    return section.name.replace("_", " ")


def _failed(section: Section) -> str | None:
    return "failed" if section.answer is None else None


def _section(section: Section, limit: int) -> Markup:
    heading = element("h2", element("a", _name(section), href=f"#{section.name}"))
    said = element("p", section.help, class_="help") if section.help else None
    if section.answer is None:
        body: Iterable[Markup] = (
            element("p", f"This analysis failed. {section.failure}", class_="failure", role="alert"),
        )
    else:
        body = _answer(section.answer, limit)
    return element("section", heading, said, *body, id=section.name)


def _answer(answer: Answer[Any], limit: int) -> Iterator[Markup]:
    if answer.facts:
        yield key_values(answer.facts)
    if answer.plots:
        yield element("div", *map(draw, answer.plots), class_="plots")
    if answer.rows:
        yield _table(answer, limit)
    elif not answer.notes:
        yield element("p", "No rows.", class_="empty")
    if answer.notes:
        yield element("ul", *(element("li", note) for note in answer.notes), class_="notes")


def _table(answer: Answer[Any], limit: int) -> Markup:
    """Formats the first rows as a table, without empty columns, like the terminal."""
    shown = answer.rows[: limit or None]
    columns = [name for name in answer.columns if any(getattr(row, name) not in (None, "") for row in shown)]
    texts = {name for name in columns if all(isinstance(getattr(row, name), str | None) for row in shown)}
    kinds = {name: "text" if name in texts else "number" for name in columns}
    heads = (
        element("th", element("button", title(name), type="button"), class_=kinds[name], scope="col")
        for name in columns
    )
    rows = (element("tr", *(_cell(name, getattr(row, name), kinds[name]) for name in columns)) for row in shown)
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    more = len(answer.rows) - len(shown)
    said = (
        f"{len(shown):,} of {len(answer.rows):,} rows; stack profile {answer.name.split()[0]} --csv prints all."
        if more
        else None
    )
    return element("div", table, element("p", said, class_="empty") if said else None, class_="wide")


def _cell(name: str, value: object, kind: str) -> Markup:
    """Formats a cell. Numbers keep their exact value in an attribute; long texts are truncated."""
    if kind == "number":
        exact = None if value is None or not isinstance(value, int | float) else repr(float(value))
        return element("td", number(name, value), class_=kind, data_value=exact)
    shown = number(name, value)
    cut = len(shown) > _LONGEST_TEXT
    return element("td", breakable(f"{shown[:_LONGEST_TEXT]}…" if cut else shown), class_=kind)
