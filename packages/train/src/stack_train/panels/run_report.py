"""`report.html` in a run's directory: the panels of all installed packages on one self-contained page."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import RunDirectoryError, StackError
from stack_core.abi.plugins import registries
from stack_core.abi.reports import Fragment
from stack_core.report.document import document
from stack_core.report.markup import Markup, breakable, element

__all__ = ["write_report"]

_LAST = 100  # order of panels that do not set one


@dataclass(frozen=True)
class _Section:
    """A panel's section of the page; `failure` is the error message, or empty."""

    name: str
    title: str
    body: Markup
    failure: str = ""


def write_report(directory: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Writes `report.html` atomically; failed panels are reported on the page.

    Args:
      directory: the run's directory.
      config: the run's resolved config, as in `config.yaml`.

    Returns:
      The failures, "panel: reason" each.

    Raises:
      RunDirectoryError: the disk is full or the directory is not writable.
    """
    sections = list(_sections(directory, config))
    path = directory / "report.html"
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(_page(directory, sections), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"The report {path} cannot be written: {error}") from error
    return tuple(f"{section.name}: {section.failure}" for section in sections if section.failure)


def _sections(directory: Path, config: Mapping[str, Any]) -> Iterator[_Section]:
    for entry in sorted(registries.panels.entries(), key=lambda entry: (entry.details.get("order", _LAST), entry.name)):
        try:
            section = _section(entry.name, registries.panels[entry.name](directory, config))
        except StackError as error:
            section = _failed(entry.name, str(error))
        except Exception as error:  # Third-party panels can raise any error; the remaining panels are still shown.
            section = _failed(entry.name, f"{type(error).__name__}: {error}")
        if section is not None:
            yield section


def _section(name: str, fragment: object) -> _Section | None:
    if fragment is None:
        return None
    if not isinstance(fragment, Fragment):
        return _failed(name, f"it returned {type(fragment).__name__}; a panel returns a Fragment or None.")
    if not isinstance(fragment.body, str):
        return _failed(name, f"its body is {type(fragment.body).__name__}; the body of a Fragment is text.")
    return _Section(name, fragment.title, element("div", fragment.body))


def _failed(name: str, reason: str) -> _Section:
    said = element("p", f"The panel {name!r} failed. {reason}", class_="failure", role="alert")
    return _Section(name, name, said, reason)


def _page(directory: Path, sections: list[_Section]) -> str:
    name = directory.resolve().name
    links = (
        element("a", each.title, href=f"#{each.name}", class_="failed" if each.failure else None) for each in sections
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    header = element(
        "header",
        element("h1", f"Run {name}"),
        element("p", breakable(str(directory)), f", written {written}", class_="source"),
    )
    shown = (
        element("section", element("h2", element("a", each.title, href=f"#{each.name}")), each.body, id=each.name)
        for each in sections
    )
    return document(f"Run {name}", header, element("nav", *links), element("main", *shown))
