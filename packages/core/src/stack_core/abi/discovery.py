"""Discovery of plugins in installed distributions, without imports."""

import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint
from typing import Any

from stack_core.abi.ops import ABI_MAJOR, ENTRY_POINT_GROUP

__all__ = ["Offer", "PluginReport", "discover"]

_ANY_GROUP = "stack.plugin"  # a prefix of the real names, to find and report misspelled groups
_VERSIONED_GROUP = re.compile(r"stack\.plugins\.v(\w+)")
_UNKNOWN = "unknown"


@dataclass
class PluginReport:
    """The state of one plugin after discovery and loading.

    Attributes:
      name: the plugin's name, from its entry point.
      distribution: name of the installed distribution with the plugin.
      version: the distribution's version.
      abi: "major.minor", or only the major if the plugin was not imported.
      status: "loaded"; "incomplete" if a hook failed or a name clashed but the rest works; "failed" if nothing is
        registered; "blocked" by an environment variable.
      problems: errors that made the plugin, or a part of it, unavailable.
      registered: names by registry, for the registries that have been read so far.
    """

    name: str
    distribution: str
    version: str
    abi: str
    status: str = "loaded"
    problems: list[str] = field(default_factory=list)
    registered: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def fail(self, problem: str) -> None:
        self.status = "failed"
        self.problems.append(problem)

    def block(self, reason: str) -> None:
        self.status = "blocked"
        self.problems.append(reason)

    def lose(self, problem: str) -> None:
        self.status = "incomplete"
        self.problems.append(problem)


@dataclass(frozen=True)
class Offer:
    """A plugin before it is loaded; `entry_point` is None if its metadata cannot be read."""

    report: PluginReport
    entry_point: EntryPoint | None


def discover(path: Sequence[str] | None = None) -> list[Offer]:
    """Finds every plugin on the path, sorted by name; plugins that this core cannot load are reported as failed.

    A distribution may offer plugins for several majors of the ABI. Plugins for other majors count only if it has none
    for this one.

    Args:
      path: folders to search, by default `sys.path`.
    """
    where: dict[str, Any] = {} if path is None else {"path": list(path)}
    offers = [offer for distribution in _offering(where) for offer in _offers(distribution)]
    return sorted(offers, key=lambda offer: (offer.report.name, offer.report.distribution))


def _offering(where: dict[str, Any]) -> Iterator[Distribution]:
    """Yields distributions that offer plugins. Of equal names only the first on the path counts, as in an import."""
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions(**where):
        if _ANY_GROUP not in _entry_points_text(distribution):
            continue
        name = _identity(distribution)[0]
        if name == _UNKNOWN:
            yield distribution
        elif name not in seen:
            seen.add(name)
            yield from list(importlib.metadata.distributions(name=name, **where))[:1]


def _entry_points_text(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError:  # not text, hence not a list of plugins
        return ""


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Returns the distribution's name and version, or "unknown" if its metadata cannot be read."""
    try:
        metadata = distribution.metadata  # parsed anew at every access
    except UnicodeDecodeError:
        return _UNKNOWN, _UNKNOWN
    name, version = (metadata[field] if field in metadata else _UNKNOWN for field in ("Name", "Version"))  # noqa: SIM401
    return name, version


def _offers(distribution: Distribution) -> list[Offer]:
    name, version = _identity(distribution)
    try:
        points = [point for point in distribution.entry_points if point.group.startswith(_ANY_GROUP)]
    except Exception as error:  # Third-party text: a malformed file must not hide other plugins.
        report = PluginReport(name, name, version, _UNKNOWN)
        report.fail(f"its entry_points.txt cannot be read ({type(error).__name__}: {error}); reinstall {name}.")
        return [Offer(report, None)]
    matching = [point for point in points if point.group == ENTRY_POINT_GROUP]
    return [Offer(_report(point, name, version), point) for point in matching or points]


def _report(point: EntryPoint, distribution: str, version: str) -> PluginReport:
    group = _VERSIONED_GROUP.fullmatch(point.group)
    report = PluginReport(point.name, distribution, version, group[1] if group else _UNKNOWN)
    if group is None:
        report.fail(f"its entry-point group {point.group!r} is unknown to core; expected {ENTRY_POINT_GROUP!r}.")
    elif point.group != ENTRY_POINT_GROUP:
        report.fail(
            f"built for plugin ABI {report.abi}, and this core offers ABI {ABI_MAJOR}; install a matching release of "
            f"{distribution}."
        )
    return report
