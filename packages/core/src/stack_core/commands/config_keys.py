"""Lists the keys of config classes, with types, defaults and the texts of their "Attributes:" sections."""

import dataclasses
import importlib
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.config import Sections, Selected, mark_of, to_mapping
from stack_core.abi.errors import UnknownName, nearest
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry

__all__ = [
    "Key",
    "attribute_texts",
    "config_keys",
    "default_of",
    "entry_class",
    "nested_classes",
    "options_of",
    "reads_config",
    "registered_classes",
]


@dataclass(frozen=True)
class Key:
    """One key that a config accepts.

    Attributes:
      name: dotted path of the key, such as "run.steps".
      type: type as text, such as "int > 0 | None".
      default: the key's default as plain data; None if `required`.
      required: True if a config must set the key.
      text: description from the docstring of its class, or "".
      plugins: plugins that register the class.
      selections: values of `selector` with which the key exists; empty if it always exists.
      selector: dotted path of the key that selects the class, such as "model.name", or "".
    """

    name: str
    type: str
    default: Any
    required: bool
    text: str
    plugins: tuple[str, ...]
    selections: tuple[str, ...] = ()
    selector: str = ""


def reads_config(command: str) -> tuple[type, Entry]:
    """Returns the config class that a command registers as its detail `config`, and the command's entry.

    Raises:
      UnknownName: there is no such command, or it reads no config file.
    """
    roots = {each.name: each for each in registries.commands.entries() if "config" in each.details}
    if command not in roots:
        known = ", ".join(roots) or "none; install stack-train for `stack train`"
        raise UnknownName(f"{command!r} reads no config file.{nearest(command, roots)} Commands that do: {known}.")
    module, _, name = roots[command].details["config"].partition(":")
    root: Any = getattr(importlib.import_module(module), name)
    return root, roots[command]


def config_keys(cls: type, plugin: str) -> list[Key]:
    """Lists the keys of a config class, its sections, and every class that a selected field may have.

    Args:
      plugin: plugin that provides the class.

    Raises:
      PluginError: a registered class cannot be imported.
    """
    merged: dict[tuple[str, ...], Key] = {}
    for key in _keys_of(cls, Key("", "", None, False, "", (plugin,))):
        # Model families share most of their keys; equal descriptions become one entry.
        same = (key.name, key.type, repr(key.default), str(key.required), key.text, key.selector)
        before = merged.get(same, key)
        merged[same] = dataclasses.replace(
            before,
            plugins=tuple(dict.fromkeys((*before.plugins, *key.plugins))),
            selections=tuple(dict.fromkeys((*before.selections, *key.selections))),
        )
    return list(merged.values())


def attribute_texts(cls: type) -> dict[str, str]:
    """Reads the "Attributes:" sections of a class and its bases; each text is one line. The class's own texts win."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lines = textwrap.dedent("    " + (base.__dict__.get("__doc__") or "").replace("\t", "    ")).splitlines()
        _, found, section = "\n".join(lines).partition("Attributes:\n")
        names: list[str] = []
        indent = 0
        for line in section.splitlines() if found else ():
            depth = len(line) - len(line.lstrip())
            if not line.strip():
                continue
            start = re.match(r"\s*([`\w]+(?:, [`\w]+)*(?:,? and [`\w]+)?): (.*)", line)
            indent = indent or depth
            if depth < indent:
                break
            if start and depth == indent:
                names = re.findall(r"\w+", start[1].replace(" and ", ", "))  # one text may describe several
                texts.update(dict.fromkeys(names, start[2]))
            else:
                texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def _keys_of(cls: type, parent: Key, outer: tuple[type, ...] = ()) -> Iterator[Key]:
    """Lists the keys of a class.

    Args:
      parent: path, plugins and selection of the class.
      outer: classes that contain this one. They are not listed again inside themselves.
    """
    if cls in outer:
        return
    outer = (*outer, cls)
    hints, texts = typing.get_type_hints(cls, include_extras=True), attribute_texts(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        name = f"{parent.name}.{field.name}" if parent.name else field.name
        place = dataclasses.replace(parent, name=name)
        default, required = default_of(field)
        if sections := mark_of(hint, Sections):
            for section, kind, plugin in registered_classes(sections.registry):
                yield from _keys_of(kind, Key(section, "", None, False, "", (plugin,)), outer)
        elif selected := mark_of(hint, Selected):
            for entry, kind, plugin in registered_classes(selected.registry):
                selection = Key(name, "", None, False, "", (plugin,), (entry,), f"{name}.{selected.key}")
                yield from (key for key in _keys_of(kind, selection, outer) if key.name != selection.selector)
            plain = to_mapping(getattr(default, selected.key, None))
            choices = " | ".join(selected.registry.names())
            text = texts.get(field.name, "")
            yield dataclasses.replace(
                place, name=f"{name}.{selected.key}", type=choices, default=plain, required=required, text=text
            )
        elif nested := nested_classes(hint):
            options = options_of(hint)
            if any(each not in (*nested, type(None)) for each in options):
                kinds = " | ".join([*(_type_text(each) for each in options if each not in nested), "keys below"])
                plain = None if dataclasses.is_dataclass(default) else to_mapping(default)
                yield dataclasses.replace(
                    place, type=kinds, default=plain, required=required, text=texts.get(field.name, "")
                )
            yield from _keys_of_classes(hint, nested, place, outer, texts.get(field.name, ""))
        else:
            text = texts.get(field.name, "")
            yield dataclasses.replace(
                place, type=_type_text(hint), default=to_mapping(default), required=required, text=text
            )
            if (entry := entry_class(hint)) is not None:
                yield from _keys_of(entry, dataclasses.replace(parent, name=f"{name}[]"), outer)


def _keys_of_classes(
    hint: Any, nested: Sequence[type], place: Key, outer: tuple[type, ...], text: str
) -> Iterator[Key]:
    """Lists the keys of a section; of several classes, by the values of the field that tells them apart."""
    if (field := _discriminator(hint)) is None:
        for kind in nested:
            yield from _keys_of(kind, place, outer)
        return
    selector = f"{place.name}.{field}"
    names = [typing.get_args(typing.get_type_hints(kind)[field])[0] for kind in nested]
    yield dataclasses.replace(place, name=selector, type=" | ".join(names), text=text)
    for name, kind in zip(names, nested, strict=True):
        own = dataclasses.replace(place, selections=(name,), selector=selector)
        yield from (key for key in _keys_of(kind, own, outer) if key.name != selector)


def registered_classes(registry: Registry[Any]) -> Iterator[tuple[str, type, str]]:
    """Yields the name, config class and plugin of every entry whose config is a dataclass."""
    for entry in registry.entries():
        found = registry[entry.name]
        kind = getattr(found, "config_class", found)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield entry.name, kind, entry.provider


def default_of(field: "dataclasses.Field[Any]") -> tuple[Any, bool]:
    """Returns the default of a field, and whether the field is required."""
    default, factory = field.default, field.default_factory
    if hasattr(default, "is_required") and hasattr(default, "get_default"):  # pydantic.Field
        return (None, True) if default.is_required() else (default.get_default(call_default_factory=True), False)
    if default is not dataclasses.MISSING:
        return default, False
    return (None, True) if factory is dataclasses.MISSING else (factory(), False)


def options_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union without their annotations; any other type is the only one."""
    if typing.get_origin(hint) is typing.Annotated:
        return options_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for each in typing.get_args(hint) for option in options_of(each))
    return (hint,)


def nested_classes(hint: Any) -> list[type]:
    """Returns the config classes that a field accepts."""
    return [each for each in options_of(hint) if isinstance(each, type) and dataclasses.is_dataclass(each)]


def _discriminator(hint: Any) -> str | None:
    """Returns the field by which pydantic tells the classes of a union apart, or None."""
    if typing.get_origin(hint) is typing.Annotated:
        marks = (getattr(mark, "discriminator", None) for mark in hint.__metadata__)
        return next((mark for mark in marks if isinstance(mark, str)), None)
    return next((found for each in typing.get_args(hint) if (found := _discriminator(each))), None)


def entry_class(hint: Any) -> type | None:
    """Returns the config class of the entries of a list, or None if they have none."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return next((found for each in typing.get_args(hint) for found in nested_classes(each)), None)
    return None


def _type_text(hint: Any) -> str:
    """Renders a type: "int > 0", "adam | sgd", "list of str"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        limits = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        bounds = [
            f"{sign} {value}"
            for mark in hint.__metadata__
            for name, sign in limits.items()
            if (value := getattr(mark, name, None)) is not None
        ]
        return " ".join([_type_text(arguments[0]), " and ".join(bounds)]).strip()
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type_text, arguments)))
    if isinstance(origin, type) and arguments:
        inner = ", ".join(_type_text(each) for each in arguments if each is not Ellipsis)
        return f"{origin.__name__} of {inner}"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
