"""Registries of named objects, which hooks fill once and which are then read as mappings."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stack_core.abi.errors import PluginError, StackError, UnknownName, nearest

__all__ = ["Entry", "Registrar", "Registry"]

T = TypeVar("T")

_NAME = re.compile(r"\w([\w .+/-]*[\w.+])?")
_NAMES = {"ops": re.compile(r"\w+/[\w.+-]+"), "op_definitions": re.compile(r"\w+"), "analyses": re.compile(r"\w+")}
_WORD = "of letters, digits and _"
_FORMS = {"ops": "of the form op/implementation", "op_definitions": _WORD, "analyses": _WORD}
# Each analysis is a command `stack profile NAME`; these names belong to its built-in commands.
_RESERVED = {"analyses": ("attach", "costs", "diff", "export", "gate", "open", "report", "ring", "run")}
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
      name: the registered name.
      target: the object, or a "module:attribute" string, resolved on first use.
      provider: name of the plugin that registered it.
      details: metadata that is available without resolving the target, such as `help`.
    """

    name: str
    target: Any
    provider: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Registrar:
    """The collector of one plugin's entries for one registry; hooks receive it as `registry`.

    Attributes:
      kind: name of the registry, such as "models".
      provider: name of the plugin whose hook is running.
      known_details: details that entries of this registry may have, with their types.
    """

    kind: str
    provider: str
    known_details: Mapping[str, type] = field(default_factory=dict)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _closed: bool = False

    def add(self, name: str, target: Any, **details: Any) -> None:
        """Registers `target`, an object or a "module:attribute" string, under `name`.

        Raises:
          PluginError: the name, the target or a detail is malformed, the name is registered twice, or the hook has
            returned already.
        """
        if self._closed:
            raise PluginError(
                f"{self.kind} {name!r} comes too late: register inside the hook stack_register_{self.kind}."
            )
        if not isinstance(name, str) or not _NAMES.get(self.kind, _NAME).fullmatch(name):
            form = _FORMS.get(self.kind, "of letters, digits and _ . + - / within")
            raise PluginError(f"{self.kind} {name!r}: expected a name {form}.")
        if name in _RESERVED.get(self.kind, ()):
            raise PluginError(
                f"{self.kind} {name!r}: `stack profile {name}` is a command of its own; take another name."
            )
        if isinstance(target, str) and not _TARGET.fullmatch(target):
            raise PluginError(f"{self.kind} {name!r}: target {target!r} is not of the form 'module:attribute'.")
        if name in self._entries:
            raise PluginError(f"{self.kind} {name!r} is registered twice by plugin {self.provider!r}.")
        for detail, value in details.items():
            self._check_detail(name, detail, value)
        self._entries[name] = Entry(name, target, self.provider, details)

    def close(self) -> tuple[Entry, ...]:
        """Returns the entries; later calls of `add` raise."""
        self._closed = True
        return tuple(self._entries.values())

    def _check_detail(self, name: str, detail: str, value: Any) -> None:
        if detail not in self.known_details:
            known = ", ".join(self.known_details) or "none"
            raise PluginError(
                f"{self.kind} {name!r}: unknown detail {detail!r}.{nearest(detail, self.known_details)} Known: {known}."
            )
        if not isinstance(value, self.known_details[detail]):
            expected = self.known_details[detail].__name__
            raise PluginError(f"{self.kind} {name!r}: {detail} is {value!r}; expected a {expected}.")


class Registry(Mapping[str, T]):
    """A read-only mapping from name to object, sorted by name, which calls its loader on first use.

    `registry[name]` imports the object. `get` returns its default only for a name that no plugin registered. A name
    that was rejected, or whose object cannot be imported, raises as `registry[name]` does.

    Args:
      kind: plural of the contents, for messages: "models".
      load: returns all entries, and the rejected names with reasons.
      advise: suggests the origin of a missing name; returns "" or a sentence with a leading space.
    """

    def __init__(
        self,
        kind: str,
        load: Callable[[], tuple[Mapping[str, Entry], Mapping[str, str]]],
        advise: Callable[[str, str], str] = lambda kind, name: "",
    ) -> None:
        self.kind = kind
        self._load = load
        self._advise = advise
        self._entries: Mapping[str, Entry] | None = None
        self._refused: Mapping[str, str] = {}
        self._resolved: dict[str, T] = {}

    def entries(self) -> tuple[Entry, ...]:
        """Returns all entries sorted by name, without resolving targets."""
        return tuple(self._frozen()[name] for name in self.names())

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._frozen()))

    # Mapping compares by content, which would import every object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._frozen() and name not in self._refused:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frozen()

    def __len__(self) -> int:
        return len(self._frozen())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> T:
        """Returns the object registered as `name`.

        Raises:
          UnknownName: no plugin registered it; the message suggests similar names and the package to install.
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
            raise self.unknown(name)
        if not isinstance(entry.target, str):
            return entry.target
        module, attribute = entry.target.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # Imports may raise anything; the message must name the plugin.
            raise PluginError(
                f"{self.kind} {name!r} of plugin {entry.provider!r} cannot be loaded from {entry.target!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def unknown(self, name: str, *, other_names: Sequence[str] = (), hint: str = "") -> StackError:
        """Builds the error for a name that is not registered.

        Args:
          other_names: other valid names at this place in the config.
          hint: suggestion that replaces the nearest name; empty, or a sentence with a leading space.
        """
        if name in self._refused:
            return PluginError(f"{self.kind} {name!r} is not available: {self._refused[name]}")
        known = (*other_names, *self.names())
        remedy = (hint or nearest(name, known)) + self._advise(self.kind, name)
        listing = ", ".join(known) or "none"
        return UnknownName(f"Unknown name {name!r} among {self.kind}.{remedy} Registered: {listing}.")
