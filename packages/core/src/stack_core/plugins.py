"""Finds plugins, loads each in its own guard, and fills the registries from their hooks.

A plugin is a module that a distribution names in the entry-point group `stack.plugins.v1`. One that fails is reported
and left out; it stops no other. `STACK_DISABLE_PLUGINS=a,b` blocks plugins by name, `STACK_LOAD_PLUGINS=a,b` loads
only those named (core is always loaded).
"""

import functools
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from stack_core import hookspecs
from stack_core.abi import ABI_MAJOR, ABI_MINOR, ENTRY_POINT_GROUP
from stack_core.errors import StackError, nearest
from stack_core.hookspecs import REGISTRY_KINDS, hookimpl
from stack_core.registry import Entry, Registrar, Registry

__all__ = ["PluginReport", "Plugins", "Registries", "hookimpl", "plugins", "registries"]

_GROUP_PREFIX = "stack.plugins.v"
_CORE = "core"

_PACKAGE_OF_KIND = {
    "models": "stack-train",
    "data_sources": "stack-train",
    "optimizers": "stack-train",
    "trainers": "stack-train",
    "checkpoint_formats": "stack-train",
    "quantizers": "stack-quant",
    "array_types": "stack-quant",
    "rewards": "stack-rl",
    "engines": "stack-serve",
}
_PACKAGE_OF_NAME = {
    "commands": {
        "train": "stack-train",
        "generate": "stack-train",
        "convert": "stack-train",
        "checkpoint": "stack-train",
        "quantize": "stack-quant",
        "tune": "stack-kernels",
        "bench": "stack-kernels",
        "serve": "stack-serve",
        "chat": "stack-serve",
        "export": "stack-serve",
        "rl": "stack-rl",
        "profile": "stack-profile",
    },
    "configs": {"quant": "stack-quant", "kernels": "stack-kernels", "profile": "stack-profile", "rl": "stack-rl"},
}


@dataclass
class PluginReport:
    """What became of one entry point.

    Attributes:
      status: "loaded", "blocked", or "failed".
      problems: why it, or a part of it, was left out.
      registered: names by registry, as far as registries have been read.
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


class Plugins:
    """The loaded plugins of this process.

    Args:
      entry_points: the entry points to consider; by default those of every installed distribution.
      environ: where the block and select variables are read.
    """

    def __init__(
        self,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._entry_points = entry_points
        self._environ = os.environ if environ is None else environ

    def reports(self) -> tuple[PluginReport, ...]:
        """One report per entry point, by name."""
        return tuple(sorted(self._loaded[1].values(), key=lambda report: report.name))

    def select_op(self, **call: Any) -> str | None:
        """The first answer of the `stack_select_op` hooks."""
        return self._loaded[0].hook.stack_select_op(**call)

    def collect(self, kind: str) -> tuple[dict[str, Entry], dict[str, str]]:
        """Calls one registration hook of every plugin; returns the entries, and names refused with the reason."""
        manager, reports = self._loaded
        claims: dict[str, list[Entry]] = {}
        for provider, report in reports.items():
            for entry in _registered(manager, report, provider, kind):
                claims.setdefault(entry.name, []).append(entry)
        entries = {name: found[0] for name, found in claims.items() if len(found) == 1}
        refused = {name: _clash(kind, name, found, reports) for name, found in claims.items() if len(found) > 1}
        for provider, report in reports.items():
            names = tuple(sorted(name for name, entry in entries.items() if entry.provider == provider))
            if names:
                report.registered[kind] = names
        return entries, refused

    @functools.cached_property
    def _loaded(self) -> tuple[pluggy.PluginManager, dict[str, PluginReport]]:
        manager = pluggy.PluginManager("stack")
        manager.add_hookspecs(hookspecs)
        reports: dict[str, PluginReport] = {}
        for entry_point in self._discovered():
            report = _report(entry_point)
            if entry_point.name in reports:
                first = reports[entry_point.name]
                report.fail(f"the name {report.name!r} is also taken by distribution {first.distribution!r}.")
                first.fail(f"the name {report.name!r} is also taken by distribution {report.distribution!r}.")
                if manager.has_plugin(report.name):
                    manager.unregister(name=report.name)
                reports[f"{report.name} ({report.distribution})"] = report
                continue
            reports[entry_point.name] = report
            if self._admitted(entry_point, report):
                _load(manager, entry_point, report)
        return manager, reports

    def _discovered(self) -> list[importlib.metadata.EntryPoint]:
        if self._entry_points is not None:
            return list(self._entry_points)
        found = importlib.metadata.entry_points()
        return [
            point for group in found.groups if group.startswith(_GROUP_PREFIX) for point in found.select(group=group)
        ]

    def _admitted(self, entry_point: importlib.metadata.EntryPoint, report: PluginReport) -> bool:
        selected = _names(self._environ, "STACK_LOAD_PLUGINS")
        if entry_point.group != ENTRY_POINT_GROUP:
            report.fail(
                f"built for plugin ABI {report.abi}; this core offers ABI {ABI_MAJOR}. Install a matching release."
            )
        elif entry_point.name in _names(self._environ, "STACK_DISABLE_PLUGINS"):
            report.status = "blocked"
            report.problems.append("blocked by STACK_DISABLE_PLUGINS.")
        elif selected and entry_point.name not in (*selected, _CORE):
            report.status = "blocked"
            report.problems.append("not among STACK_LOAD_PLUGINS.")
        return report.status == "loaded"


def _names(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in environ.get(variable, "").split(",") if name.strip())


def _report(entry_point: importlib.metadata.EntryPoint) -> PluginReport:
    distribution = entry_point.dist
    return PluginReport(
        name=entry_point.name,
        distribution=distribution.name if distribution else "unknown",
        version=distribution.version if distribution else "unknown",
        abi=entry_point.group.removeprefix(_GROUP_PREFIX),
    )


def _load(manager: pluggy.PluginManager, entry_point: importlib.metadata.EntryPoint, report: PluginReport) -> None:
    try:
        module = entry_point.load()
    except Exception as error:  # A plugin may fail in any way while it is imported; that must stop no other plugin.
        report.fail(f"importing {entry_point.value} raised {type(error).__name__}: {error}")
        return
    minor = getattr(module, "STACK_ABI_MINOR", None)
    report.abi = f"{ABI_MAJOR}.{minor}"
    if not isinstance(minor, int):
        report.fail(f"{entry_point.value} does not define the integer STACK_ABI_MINOR.")
    elif minor > ABI_MINOR:
        report.fail(
            f"needs plugin ABI {ABI_MAJOR}.{minor}; this core offers {ABI_MAJOR}.{ABI_MINOR}. Update stack-core."
        )
    else:
        _register(manager, module, report)


def _register(manager: pluggy.PluginManager, module: Any, report: PluginReport) -> None:
    try:
        manager.register(module, name=report.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        report.fail(str(error))
        return
    known = [name for name in vars(hookspecs) if name.startswith("stack_")]
    for caller in manager.get_hookcallers(module) or ():
        if caller.spec is None:
            manager.unregister(name=report.name)
            report.fail(f"implements the unknown hook {caller.name!r}.{nearest(caller.name, known)}")
            return


def _registered(manager: pluggy.PluginManager, report: PluginReport, provider: str, kind: str) -> list[Entry]:
    if report.status != "loaded":
        return []
    others = [plugin for name, plugin in manager.list_name_plugin() if name != provider and plugin is not None]
    registrar = Registrar(kind, provider)
    try:
        manager.subset_hook_caller(f"stack_register_{kind}", others)(registry=registrar)
    except Exception as error:  # A hook may fail in any way; that must cost its own plugin's names and no others.
        detail = str(error) if isinstance(error, StackError) else f"{type(error).__name__}: {error}"
        report.problems.append(f"stack_register_{kind} failed, so its {kind} are left out: {detail}")
        return []
    return registrar.entries


def _clash(kind: str, name: str, found: list[Entry], reports: Mapping[str, PluginReport]) -> str:
    providers = [entry.provider for entry in found]
    reason = f"plugins {' and '.join(map(repr, providers))} both register it; block one with STACK_DISABLE_PLUGINS."
    for provider in providers:
        reports[provider].problems.append(f"{kind} {name!r} refused: {reason}")
    return reason


def _provider_of(kind: str, name: str) -> str | None:
    """The distribution that would provide a missing name, unless it is installed already."""
    package = _PACKAGE_OF_NAME.get(kind, {}).get(name) or _PACKAGE_OF_KIND.get(kind)
    if package is None or package in {report.distribution for report in plugins.reports()}:
        return None
    return package


class Registries:
    """One `Registry` per kind, as attributes: `registries.models["llama"]`."""

    def __init__(self, source: Plugins) -> None:
        self._source = source
        self._by_kind: dict[str, Registry[Any]] = {}

    def __getattr__(self, kind: str) -> Registry[Any]:
        if kind not in REGISTRY_KINDS:
            raise AttributeError(f"there is no registry {kind!r}.{nearest(kind, REGISTRY_KINDS)}")
        if kind not in self._by_kind:
            self._by_kind[kind] = Registry(kind, functools.partial(self._source.collect, kind), _provider_of)
        return self._by_kind[kind]


plugins = Plugins()
registries = Registries(plugins)
