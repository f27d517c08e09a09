"""Frozen configs: parsed from YAML and dotted overrides, validated, and written back in resolved form.

A config is a class decorated with `@config`; parents contain their children. A field may be *selected*: one key of its
mapping names a registry entry, which provides the class for the other keys. A class with a `Sections` field accepts
the top-level sections that installed packages register.
"""

import dataclasses
import functools
import operator
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
import yaml

from stack_core.abi.errors import ConfigError, nearest
from stack_core.abi.local_paths import local_address, local_path, refuse_remote
from stack_core.abi.registry import Registry

__all__ = [
    "LocalAddress",
    "LocalPath",
    "MayBeRemote",
    "Sections",
    "Selected",
    "apply_overrides",
    "changed_fields",
    "config",
    "differences",
    "dotted_keys",
    "is_under",
    "load_yaml",
    "mark_of",
    "parse",
    "to_mapping",
    "to_yaml",
]

C = TypeVar("C")
_PLAIN = {"dataclass_type": "Input should be a section of keys", "unexpected_keyword_argument": "The key is unknown"}
_UNION_TYPE = re.compile(r"^[A-Z]\w*$|\[.*\]$")  # such as "NamedRemat" and "literal['none','full']"

LocalPath = Annotated[str, pydantic.AfterValidator(lambda path: str(local_path(path)))]
"""The path of a file or directory."""

LocalAddress = Annotated[str, pydantic.AfterValidator(local_address)]
"""The address of a run, or "FORMAT:DIR"."""


class MayBeRemote:
    """Marks a string that may be an address of remote storage, which other strings of a config may not be."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, pydantic.Field))
def config(cls: type[C]) -> type[C]:
    """Makes a frozen keyword-only config class; unknown keys and wrong types are errors.

    A ClassVar `moved_keys` maps former keys of the class to the settings that replaced them, for the error message.

    Numbers and booleans are strict: `true` is not the number 1, and "300" is not 300. An integer is a valid float. A
    string must not be the address of remote storage.
    """
    cls.__annotations__ = {name: _strict(_evaluated(hint, cls)) for name, hint in cls.__annotations__.items()}
    settings = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)  # pyrefly: ignore


@dataclass(frozen=True)
class Selected:
    """Marks a field whose mapping names an entry of `registry` under `key`: `Annotated[Any, Selected(...)]`.

    The entry is a config class, or an object whose `config_class` is one. That class has a field `key` as well. A
    mapping without `key` is parsed as the class of the field's default.

    Attributes:
      registry: registry of the names.
      key: key that holds the name.
      former: former name of the key, accepted with a warning that names the new one; "" if there is none.
    """

    registry: Registry[Any]
    key: str = "name"
    former: str = ""

    def with_key(self, mapping: Mapping[str, Any], path: str = "") -> Mapping[str, Any]:
        """Renames the former key of a mapping.

        Args:
          path: dotted path of the mapping, for a warning; "" does not warn.

        Raises:
          ConfigError: the mapping has both keys.
        """
        if not self.former or self.former not in mapping:
            return mapping
        if self.key in mapping:
            raise ConfigError(f"{path}.{self.former} is the former name of {path}.{self.key}. Remove one of them.")
        if path:
            warnings.warn(
                f"{path}.{self.former} is now {path}.{self.key}. The former name will be refused in a later release.",
                FutureWarning,
                stacklevel=2,
            )
        return {self.key if key == self.former else key: value for key, value in mapping.items()}

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Accepts a name or a mapping when the class is constructed in Python, and rejects objects without `key`."""
        return pydantic.PlainValidator(self._validated).__get_pydantic_core_schema__(source, handler)

    def _validated(self, value: Any, info: Any) -> Any:
        field = info.field_name or self.key
        if isinstance(value, (str, Mapping)):
            return _parse_selected(self, value, field, None)
        if not isinstance(getattr(value, self.key, None), str):
            raise ConfigError(
                f"{field} is {value!r}; expected a name, a mapping with the key {self.key!r}, or an object of one of "
                f"the config classes. Names: {', '.join(self.registry.names()) or 'none is registered'}."
            )
        return value


@dataclass(frozen=True)
class Sections:
    """Marks the field that collects the remaining top-level sections by name; each class comes from `registry`."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Accepts sections as mappings when the class is constructed in Python."""
        return pydantic.PlainValidator(self._validated).__get_pydantic_core_schema__(source, handler)

    def _validated(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"sections is {value!r}; expected a mapping from names to sections.")
        sections = {str(name): (self.registry[str(name)], section) for name, section in value.items()}
        return {name: x if isinstance(x, cls) else parse(cls, x, path=name) for name, (cls, x) in sections.items()}


class _StrictLoader(yaml.SafeLoader):
    """A loader that reads scalars as YAML 1.2 does and rejects duplicate keys, of which YAML silently keeps the last.

    PyYAML implements YAML 1.1, which reads 010 as 8, 1:30 as 90, no as false and 1e-3 as text.
    """

    yaml_implicit_resolvers = dict[str, Any]()  # noqa: RUF012, PyYAML's way to have resolvers of one's own

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if repeated is not None:
            raise ConfigError(f"Key {repeated!r} is written twice{node.start_mark}. Keep one of them.")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes strings which `_StrictLoader` would read as another type."""

    yaml_implicit_resolvers = dict[str, Any]()  # noqa: RUF012, PyYAML's way to have resolvers of one's own


_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.nan|\.NaN|\.NAN",
        list("-+.0123456789"),
    ),
}
"""Tag -> (pattern, first characters) of the core schema of YAML 1.2; the first that matches decides."""

for _kind in (_StrictLoader, _Dumper):
    for _tag, (_pattern, _first) in _SCALARS.items():
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
    _kind.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"])


def _integer(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError as error:  # Python reads 4,300 digits at most
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file.

    Raises:
      ConfigError: the file is missing or unreadable, is not YAML, or does not contain a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read config {str(path)!r}: {error}. Give the path of a YAML file.") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Reads a mapping from YAML text; `name` is its origin, for error messages."""
    try:
        mapping = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        fix = "Indent with spaces: YAML forbids tabs." if r"'\t'" in str(error) else "Correct the file at this place."
        raise ConfigError(f"Config {name!r} is not valid YAML: {error}\n{fix}") from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ConfigError(f"Config {name!r} holds a {type(mapping).__name__}; a mapping of sections was expected.")
    return mapping


def apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of `mapping` with each "section.key=value" applied; values are parsed as YAML.

    Raises:
      ConfigError: an override has no "=", or its path leads through a value that is not a section.
    """
    result = _copy(mapping)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"Override {override!r} is not of the form section.key=value, such as run.steps=300.")
        *parents, leaf = path.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"Override {override!r}: {parent!r} is the value {section!r}, not a section. Set {parent!r} itself."
                )
        try:
            section[leaf] = yaml.load(text, _StrictLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"Override {override!r}: the value is not valid YAML: {error}") from error
    return result


def parse(cls: type[C], mapping: Any, *, path: str = "") -> C:
    """Builds `cls` from a mapping.

    Args:
      path: dotted prefix of the mapping in the full config, for messages.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or a missing value; names the dotted path.
      UnknownName: a selected name or a section that no plugin registers.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path or 'The config'} is {mapping!r}; a mapping with keys of {cls.__name__} was expected.")
    hints = typing.get_type_hints(cls, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # pyrefly: ignore
    sections_field = next((name for name in defaults if mark_of(hints[name], Sections)), None)
    names = [name for name in defaults if name != sections_field]
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for key, value in mapping.items():
        where = f"{path}.{key}" if path else str(key)
        if key in names:
            if value is None and defaults[key] is None:
                continue
            values[key] = _parse_field(hints[key], value, where, defaults[key])
        elif sections_field:
            mark = mark_of(hints[sections_field], Sections)
            assert mark is not None, "found by its mark"
            if key not in mark.registry:
                keys = {name: _keys(hints[name], mapping.get(name), defaults[name]) for name in names}
                inside = [f"'{name}.{key}'" for name in names if key in keys[name]]
                hint = f" Did you mean {' or '.join(inside)}?" if inside else ""
                raise mark.registry.unknown(str(key), other_names=names, hint=hint)
            sections[key] = parse(mark.registry[key], value, path=str(key))
        elif moved := getattr(cls, "moved_keys", {}).get(key):
            raise ConfigError(f"There is no key {where!r} any more: it is now {moved}. Move the setting there.")
        else:
            raise ConfigError(
                f"Unknown key {where!r}.{nearest(str(key), names)} {cls.__name__} has: {', '.join(names)}."
            )
    if sections_field:
        values[sections_field] = sections
    try:
        return cls(**values)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, path)) from error


def with_current_keys(cls: type, mapping: Mapping[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """Renames former keys (`Selected.former`) in the mapping of a config of `cls`.

    Args:
      warn: whether to name the new keys in a warning. A config that an earlier version saved needs none.
    """
    hints = typing.get_type_hints(cls, include_extras=True)

    def renamed(key: str, value: Any) -> Any:
        selection = mark_of(hints.get(key), Selected)
        return selection.with_key(value, key if warn else "") if selection and isinstance(value, Mapping) else value

    return {key: renamed(key, value) for key, value in mapping.items()}


def changed_fields(value: Any, names: Sequence[str]) -> list[str]:
    """Returns the fields among `names` whose value differs from their default."""
    fields = type(value).__dataclass_fields__
    return [name for name in names if getattr(value, name) != fields[name].default]


def to_mapping(value: Any) -> Any:
    """Converts a config to plain dicts, lists and scalars, defaults included. A function becomes "module:name"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value), include_extras=True)
        result: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            plain = to_mapping(getattr(value, field.name))
            result.update(plain if mark_of(hints[field.name], Sections) else {field.name: plain})
        return result
    if isinstance(value, Mapping):
        return {key: to_mapping(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_mapping(item) for item in value]
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value) if isinstance(value, Path) else value


def to_yaml(value: Any) -> str:
    """Returns the resolved config as YAML; `parse` reads it back to an equal config."""
    return yaml.dump(to_mapping(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def differences(actual: Any, expected: Any, path: str = "") -> list[str]:
    """Lists "path: actual, not expected" for every leaf in which two plain mappings differ, also inside lists."""
    actual, expected = (_by_place(side) for side in (actual, expected))
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        keys = [*actual, *(key for key in expected if key not in actual)]
        prefix = f"{path}." if path else ""
        return [line for key in keys for line in differences(actual.get(key), expected.get(key), f"{prefix}{key}")]
    return [] if actual == expected else [f"{path}: {actual!r}, not {expected!r}"]


def dotted_keys(mapping: Any, path: str = "") -> set[str]:
    """Returns the dotted path of every key in nested mappings and lists: "run", "run.seed", "quant.rules.0.weights"."""
    mapping = _by_place(mapping)
    if not isinstance(mapping, Mapping):
        return set()
    found = {f"{path}.{key}" if path else str(key): value for key, value in mapping.items()}
    return set(found).union(*(dotted_keys(value, key) for key, value in found.items()))


def is_under(line: str, keys: Iterable[str]) -> bool:
    """Returns whether a line of `differences` concerns one of `keys` or a key inside it.

    "run.seed: 1, not 2" is under "run".
    """
    key = line.partition(":")[0]
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _evaluated(hint: Any, cls: type) -> Any:
    """Evaluates a type hint that `from __future__ import annotations` turned into a string."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, vars(sys.modules[cls.__module__]), dict(vars(cls)))
    except NameError:  # a class defined later; Pydantic resolves it
        return hint


def _strict(hint: Any) -> Any:
    """Makes numbers and booleans strict and rejects remote paths in strings, also inside containers and unions."""
    if hint in (int, float, bool):
        return Annotated[hint, pydantic.Strict()]
    if hint is str:
        return Annotated[hint, pydantic.AfterValidator(refuse_remote)]
    if mark_of(hint, MayBeRemote) is None:
        return _strict_parts(hint)
    return hint


def _strict_parts(hint: Any) -> Any:
    """Applies `_strict` to the arguments of a type."""
    origin: Any = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        annotated: Any = Annotated
        return annotated[(_strict(arguments[0]), *hint.__metadata__)]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_strict, arguments))
    if isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        generic: Any = origin
        return generic[tuple(each if each is Ellipsis else _strict(each) for each in arguments)]
    return hint


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _by_place(value: Any) -> Any:
    """Converts a list of mappings to a mapping from index to entry; returns other values unchanged."""
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        return {str(place): entry for place, entry in enumerate(value)}
    return value


def mark_of(hint: Any, kind: type[C]) -> C | None:
    """Returns the mark of a class, such as `Selected`, in an annotated type; None if there is none."""
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind)), None)


def _parse_field(hint: Any, value: Any, path: str, default: Any) -> Any:
    if selection := mark_of(hint, Selected):
        return _parse_selected(selection, value, path, default)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    # Their entries are parsed here, because Pydantic would not prefix the path to an error of a nested `parse`.
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _parse_field(arguments[1], each, f"{path}.{key}", None) for key, each in value.items()}
    if origin is tuple and arguments[1:] == (...,) and isinstance(value, (list, tuple)):
        return [_parse_field(arguments[0], each, f"{path}.{place}", None) for place, each in enumerate(value)]
    options = arguments if origin in (typing.Union, types.UnionType) else (hint,)
    nested = next((option for option in options if dataclasses.is_dataclass(option)), None)
    if nested is None or isinstance(value, nested) or (value is None and type(None) in options):
        return value
    if not isinstance(value, Mapping) and set(options) - {nested, type(None)}:
        return value  # a union such as `float | Settings`: pydantic checks the other types
    return parse(nested, value, path=path)


def _parse_selected(selection: Selected, value: Any, path: str, default: Any) -> Any:
    if not isinstance(value, Mapping) and not isinstance(value, str):
        return value
    mapping = {selection.key: value} if isinstance(value, str) else selection.with_key(value, path)
    if hasattr(default, selection.key):  # a mapping without a name selects the default's entry
        mapping = {selection.key: getattr(default, selection.key), **mapping}
    known = ", ".join(selection.registry.names()) or "none is registered"
    if selection.key not in mapping:
        raise ConfigError(f"{path} lacks the key {selection.key!r}, which names one of: {known}.")
    entry = selection.registry[mapping[selection.key]]
    return parse(getattr(entry, "config_class", entry), mapping, path=path)


def _keys(hint: Any, value: Any, default: Any) -> tuple[str, ...]:
    """Returns the keys that a section accepts with its current value, or () if the field is not a section."""
    holder = default if dataclasses.is_dataclass(default) else hint
    if (selection := mark_of(hint, Selected)) and value is not None:
        name = value.get(selection.key, value.get(selection.former)) if isinstance(value, Mapping) else value
        if isinstance(name, str) and name in selection.registry:
            entry = selection.registry[name]
            holder = getattr(entry, "config_class", entry)
    return tuple(field.name for field in dataclasses.fields(holder)) if dataclasses.is_dataclass(holder) else ()


def _explain(error: pydantic.ValidationError, path: str) -> str:
    problems: dict[tuple[str, str], list[str]] = {}  # a value of a union has a problem with each of its types
    for problem in error.errors():
        loc = [part for part in map(str, problem["loc"]) if not _UNION_TYPE.search(part)]
        where = ".".join([*filter(None, [path]), *loc]) or "The config"
        if problem["type"] in ("missing", "missing_keyword_only_argument"):
            problems[f"{where} is missing; it has no default.", ""] = []
            continue
        message = _PLAIN.get(problem["type"], problem["msg"]).removeprefix("Value error, ").removesuffix(".")
        message = message.replace("Unable to extract tag using discriminator", "The section lacks the key")
        problems.setdefault((f"{where}: ", f" (given {problem['input']!r})."), []).append(message)
    texts = {key: ", or ".join(each).replace(", or Input should be ", ", or ") for key, each in problems.items()}
    return "\n".join(start + text + end for (start, end), text in texts.items())
