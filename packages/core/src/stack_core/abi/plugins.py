"""Plugin loading and the registries that the plugins' hooks fill.

A plugin is a module that a distribution names in the entry-point group `stack.plugins.v1`. A plugin that fails is
reported and left out; the others still load. `STACK_DISABLE_PLUGINS=a,b` blocks plugins, `STACK_LOAD_PLUGINS=a,b`
loads only the named ones. Both accept the name of a plugin or of its distribution. Core is always loaded.
"""

import functools
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from stack_core.abi import hookspecs
from stack_core.abi.discovery import PluginReport, discover
from stack_core.abi.errors import PluginError, StackError, nearest
from stack_core.abi.hookspecs import DETAILS, HOOKS, REGISTRY_KINDS, hookimpl
from stack_core.abi.installing import install_command
from stack_core.abi.ops import ABI_MAJOR, ABI_MINOR
from stack_core.abi.registry import Entry, Registrar, Registry

__all__ = ["PluginReport", "Plugins", "Registries", "hookimpl", "plugins", "provider_of", "registries"]

T = TypeVar("T")

_CORE = "core"
_CORE_DISTRIBUTION = "stack-core"
_DISABLE, _LOAD = "STACK_DISABLE_PLUGINS", "STACK_LOAD_PLUGINS"

_PROVIDERS = Path(__file__).with_name("providers.json")  # written by tools/providers.py


class Plugins:
    """The plugins of this process, loaded on first use.

    Args:
      path: folders to search for distributions, by default `sys.path`.
      environ: source of the variables `STACK_DISABLE_PLUGINS` and `STACK_LOAD_PLUGINS`, by default `os.environ`.
    """

    def __init__(self, path: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._environ = os.environ if environ is None else environ
        self._lock = threading.RLock()
        self._results: dict[str, Any] = {}
        self._running: set[str] = set()
        self._silenced: set[str] = set()

    def reports(self) -> tuple[PluginReport, ...]:
        """Returns one report per plugin, sorted by name."""
        return self._loaded().reports

    def mistakes(self) -> tuple[str, ...]:
        """Lists mistakes in the environment variables that block and select plugins."""
        known = sorted({name for report in self.reports() for name in (report.name, report.distribution)})
        found = [
            f"{variable} names {name!r}, which no installed distribution offers.{nearest(name, known)}"
            for variable in (_DISABLE, _LOAD)
            for name in self._named_in(variable)
            if name not in known
        ]
        if {_CORE, _CORE_DISTRIBUTION} & set(self._named_in(_DISABLE)):
            found.append(f"{_DISABLE} names core, which is always loaded.")
        return tuple(found)

    def select_op(self, **call: Any) -> str | None:
        """Returns the first answer of the `stack_select_op` hooks; a hook that raises is reported and disabled."""
        loaded = self._loaded()
        for provider in [impl.plugin_name for impl in reversed(loaded.manager.hook.stack_select_op.get_hookimpls())]:
            if provider in self._silenced:
                continue
            try:
                answer = loaded.hook(provider, "stack_select_op")(**call)
            except Exception as error:  # A hook may raise anything; the choice does not depend on this plugin.
                self._silenced.add(provider)
                problem = f"stack_select_op failed, so it is not asked again: {_describe_error(error)}"
                loaded.by_name[provider].lose(problem)
                warnings.warn(f"Plugin {provider!r}: {problem}", RuntimeWarning, stacklevel=2)
                continue
            if answer is not None:
                return answer
        return None

    def collect(self, kind: str) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
        """Returns the entries of one registry, and the rejected names with reasons; the hooks are called only once."""
        return self._once(f"the registry of {kind}", functools.partial(self._collect, kind))

    def _collect(self, kind: str) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
        loaded = self._loaded()
        claims: dict[str, list[Entry]] = {}
        for provider in loaded.by_name:
            for entry in _registered(loaded, provider, kind):
                claims.setdefault(entry.name, []).append(entry)
        _keep_cores(loaded, kind, claims)
        if kind == "ops":
            _check_ops(loaded, claims, self.collect("op_definitions")[0])
        entries = {name: found[0] for name, found in claims.items() if len(found) == 1}
        refused = {name: _refuse(loaded, kind, name, found) for name, found in claims.items() if len(found) > 1}
        for provider, report in loaded.by_name.items():
            names = tuple(sorted(name for name, entry in entries.items() if entry.provider == provider))
            if names:
                report.registered[kind] = names
        return entries, refused

    def _loaded(self) -> "_Loaded":
        return self._once("the list of plugins", self._load)

    def _load(self) -> "_Loaded":
        manager = pluggy.PluginManager("stack")
        manager.add_hookspecs(hookspecs)
        offers = discover(self._path)
        for offer in offers:
            self._block(offer.report)
        _refuse_shared_names([offer.report for offer in offers])
        for offer in reversed(offers):  # pluggy calls the last one first: selectors answer in order of names
            if offer.entry_point is not None and offer.report.status == "loaded":
                _load_one(manager, offer.entry_point, offer.report)
        return _Loaded(manager, tuple(offer.report for offer in offers))

    def _block(self, report: PluginReport) -> None:
        names = {report.name, report.distribution}
        selected = self._named_in(_LOAD)
        if report.distribution == _CORE_DISTRIBUTION:
            return
        if names.intersection(self._named_in(_DISABLE)):
            report.block(f"blocked by {_DISABLE}.")
        elif selected and not names.intersection(selected):
            report.block(f"not among {_LOAD}.")

    def _named_in(self, variable: str) -> list[str]:
        return [name.strip() for name in self._environ.get(variable, "").split(",") if name.strip()]

    def _once(self, subject: str, compute: Callable[[], T]) -> T:
        """Computes a result on first use, while other threads wait."""
        with self._lock:
            if subject in self._running:
                raise PluginError(
                    f"A plugin reads {subject} too early, on import or in a hook. Read it later, inside a function."
                )
            if subject not in self._results:
                self._running.add(subject)
                try:
                    self._results[subject] = compute()
                finally:
                    self._running.discard(subject)
            return self._results[subject]


class _Loaded:
    """The result of loading: the plugin manager, all reports, and the reports of loaded plugins by name."""

    def __init__(self, manager: pluggy.PluginManager, reports: tuple[PluginReport, ...]) -> None:
        self.manager = manager
        self.reports = reports
        self.by_name = {report.name: report for report in reports if report.status == "loaded"}

    def hook(self, provider: str, name: str) -> Callable[..., Any]:
        """Returns a caller of the hook as implemented by a single plugin."""
        others = [plugin for other, plugin in self.manager.list_name_plugin() if other != provider]
        return self.manager.subset_hook_caller(name, others)


def _refuse_shared_names(reports: Sequence[PluginReport]) -> None:
    """Rejects plugins that share a name, except core."""
    claims: dict[str, list[PluginReport]] = {}
    for report in reports:
        if report.status == "loaded":
            claims.setdefault(report.name, []).append(report)
    for name, claimants in claims.items():
        distributions = sorted(repr(report.distribution) for report in claimants)
        for report in claimants if len(claimants) > 1 else ():
            if report.distribution != _CORE_DISTRIBUTION:
                report.fail(
                    f"distributions {' and '.join(distributions)} each name their plugin {name!r}; uninstall one, or "
                    f"block it by its distribution: {_DISABLE}={report.distribution}."
                )


def _load_one(manager: pluggy.PluginManager, entry_point: EntryPoint, report: PluginReport) -> None:
    try:
        plugin = entry_point.load()
        problem = _register(manager, plugin, report)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Plugins may raise anything, also SystemExit or a compiled module's panic.
        problem = f"importing {entry_point.value} raised {_describe_error(error)}"
    if problem is not None:
        report.fail(problem)
        manager.unregister(name=report.name)


def _register(manager: pluggy.PluginManager, plugin: Any, report: PluginReport) -> str | None:
    """Registers the plugin with the manager; returns an error message, or None on success."""
    minor = getattr(plugin, "STACK_ABI_MINOR", None)
    if type(minor) is not int:
        return f"{plugin!r} does not define the integer STACK_ABI_MINOR."
    report.abi = f"{ABI_MAJOR}.{minor}"
    if minor > ABI_MINOR:
        return f"needs plugin ABI {report.abi}, and this core offers {ABI_MAJOR}.{ABI_MINOR}; update stack-core."
    if manager.is_registered(plugin):
        return f"its module is already loaded as plugin {manager.get_name(plugin)!r}; name it once."
    try:
        manager.register(plugin, name=report.name)
    except pluggy.PluginValidationError as error:
        return str(error)
    return " ".join(_misspelled(manager, plugin)) or None


def _misspelled(manager: pluggy.PluginManager, plugin: Any) -> list[str]:
    """Describes hooks that core would never call."""
    callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
    unknown = [
        f"implements the unknown hook {name!r}.{nearest(name, HOOKS)}"
        for name, caller in callers.items()
        if caller.spec is None
        and not all(impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin)
    ]
    unmarked = [
        f"defines {name} without @hookimpl, so it is never called."
        for name in HOOKS
        if name not in callers and callable(getattr(plugin, name, None))
    ]
    return unknown + unmarked


def _registered(loaded: _Loaded, provider: str, kind: str) -> Sequence[Entry]:
    registrar = Registrar(kind, provider, DETAILS.get(kind, {}))
    try:
        loaded.hook(provider, f"stack_register_{kind}")(registry=registrar)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Hooks may raise anything; only their own plugin loses its names.
        loaded.by_name[provider].lose(
            f"stack_register_{kind} failed, so its {kind} are left out: {_describe_error(error)}"
        )
        return ()
    return registrar.close()


def _refuse(loaded: _Loaded, kind: str, name: str, found: Sequence[Entry]) -> str:
    providers = [entry.provider for entry in found]
    reason = f"plugins {' and '.join(map(repr, providers))} each register it; block one with {_DISABLE}."
    for provider in providers:
        loaded.by_name[provider].lose(f"{kind} {name!r} refused: {reason}")
    return reason


def _keep_cores(loaded: _Loaded, kind: str, claims: dict[str, list[Entry]]) -> None:
    """Reserves core's names: another plugin that registers one loses it, with a warning."""
    for name, found in claims.items():
        cores = [entry for entry in found if entry.provider == _CORE]
        for entry in found if cores and len(found) > 1 else ():
            if entry.provider != _CORE:
                problem = f"{kind} {name!r} refused: it is core's own; register yours under another name."
                loaded.by_name[entry.provider].lose(problem)
                warnings.warn(f"Plugin {entry.provider!r}: {problem}", RuntimeWarning, stacklevel=2)
        claims[name] = cores or found


def _check_ops(loaded: _Loaded, claims: dict[str, list[Entry]], defined: Mapping[str, Entry]) -> None:
    """Rejects implementations of undefined ops, and reports ops without a reference."""
    for name in [name for name in claims if name.partition("/")[0] not in defined]:
        for entry in claims.pop(name):
            op = name.partition("/")[0]
            hint = f"{nearest(op, tuple(defined))} There are: {', '.join(sorted(defined))}."
            loaded.by_name[entry.provider].lose(f"ops {name!r} refused: there is no op {op!r}.{hint}")
    for op, entry in defined.items():
        if f"{op}/reference" not in claims:
            problem = f"op_definitions {op!r} has no reference; register {op + '/reference'!r} in stack_register_ops."
            loaded.by_name[entry.provider].lose(problem)


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, StackError) else f"{type(error).__name__}: {error}"


class Registries:
    """One `Registry` per kind, as attributes: `registries.models["llama"]`."""

    def __init__(self, source: Plugins) -> None:
        self._source = source
        self._by_kind: dict[str, Registry[Any]] = {}

    def __getattr__(self, kind: str) -> Registry[Any]:
        if kind not in REGISTRY_KINDS:
            raise AttributeError(f"there is no registry {kind!r}.{nearest(kind, REGISTRY_KINDS)}")
        if kind not in self._by_kind:
            self._by_kind[kind] = Registry(kind, functools.partial(self._source.collect, kind), self._advice)
        return self._by_kind[kind]

    def _advice(self, kind: str, name: str) -> str:
        """Suggests the origin of a missing name: a package that is not installed, or a plugin that was left out."""
        package = provider_of(kind, name)
        reports = self._source.reports()
        absent = package is not None and package not in {report.distribution for report in reports}
        left_out = ", ".join(repr(report.name) for report in reports if report.status != "loaded")
        install = f" `{install_command(package)}` provides it." if absent and package is not None else ""
        return install + (f" Plugins that are not fully loaded: {left_out}; see `stack plugins`." if left_out else "")


def provider_of(kind: str, name: str = "") -> str | None:
    """Returns the distribution that provides a name of a registry, or any name; None if none is known."""
    names = json.loads(_PROVIDERS.read_text(encoding="utf-8")).get(kind, {})
    return names.get(name) or names.get("*")


plugins = Plugins()
registries = Registries(plugins)
