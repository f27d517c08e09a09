"""Named things that plugins provide, filled once by hooks and read as a dict ever after."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stack_core.errors import PluginError, StackError, UnknownName, nearest

__all__ = ["Entry", "Registrar", "Registry"]

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
      target: the object, or "module:attribute" naming it; resolved on first use.
      provider: the plugin that registered it.
      details: what can be shown without resolving the target, such as `help`.
    """

    name: str
    target: Any
    provider: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Registrar:
    """What a hook is handed: collects one plugin's entries for one registry."""

    kind: str
    provider: str
    entries: list[Entry] = field(default_factory=list)

    def add(self, name: str, target: Any, **details: Any) -> None:
        """Registers `target`, an object or a "module:attribute" string, under `name`.

        Raises:
          PluginError: the plugin registers the name twice, or the string is not "module:attribute".
        """
        if isinstance(target, str) and target.count(":") != 1:
            raise PluginError(f"{self.kind} {name!r}: target {target!r} is not of the form 'module:attribute'.")
        if any(entry.name == name for entry in self.entries):
            raise PluginError(f"{self.kind} {name!r} is registered twice by plugin {self.provider!r}.")
        self.entries.append(Entry(name, target, self.provider, details))


class Registry(Generic[T]):
    """A read-only mapping from name to object; it runs its loader on first use, then never again.

    Args:
      kind: what it holds, in the plural, for messages: "models".
      load: returns all entries and, for names that were refused, the reason.
      provider_of: names the package that would provide a missing name, or returns None.
    """

    def __init__(
        self,
        kind: str,
        load: Callable[[], tuple[Mapping[str, Entry], Mapping[str, str]]],
        provider_of: Callable[[str, str], str | None] = lambda kind, name: None,
    ) -> None:
        self.kind = kind
        self._load = load
        self._provider_of = provider_of
        self._entries: Mapping[str, Entry] | None = None
        self._refused: Mapping[str, str] = {}
        self._resolved: dict[str, T] = {}

    def entries(self) -> tuple[Entry, ...]:
        """All entries, sorted by name; no target is resolved."""
        return tuple(self._frozen()[name] for name in self.names())

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._frozen()))

    def __contains__(self, name: object) -> bool:
        return name in self._frozen()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> T:
        """The object registered as `name`.

        Raises:
          UnknownName: no plugin registered it; names its neighbours and the package that would provide it.
          PluginError: two plugins claim it, or its target cannot be imported.
        """
        try:
            return self._resolved[name]
        except KeyError:
            return self._resolved.setdefault(name, self._resolve(name))

    def _frozen(self) -> Mapping[str, Entry]:
        if self._entries is None:
            self._entries, self._refused = self._load()
        return self._entries

    def _resolve(self, name: str) -> T:
        entry = self._frozen().get(name)
        if entry is None:
            raise self._unknown(name)
        if not isinstance(entry.target, str):
            return entry.target
        module, attribute = entry.target.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"{self.kind} {name!r} of plugin {entry.provider!r} cannot be loaded from {entry.target!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _unknown(self, name: str) -> StackError:
        if name in self._refused:
            return PluginError(f"{self.kind} {name!r} is not available: {self._refused[name]}")
        known = self.names()
        provider = self._provider_of(self.kind, name)
        remedy = f" `pip install {provider}` provides it." if provider else nearest(name, known)
        listing = ", ".join(known) or "none"
        return UnknownName(f"Unknown name {name!r} among {self.kind}.{remedy} Registered: {listing}.")
