"""`stack config show`: the resolved config of a file, with the origin of each value."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from stack_core.abi.config import apply_overrides, load_yaml, parse, to_mapping, to_yaml
from stack_core.abi.registry import Entry
from stack_core.cli import overrides_from
from stack_core.commands.config_keys import config_keys, reads_config

__all__ = ["show"]


def show(
    file: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    command: str = "train",
    origins: bool = True,
    changed: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show the resolved config of a file, with the origin of each value: stack config show run.yaml

    The output is a config file. `start` marks values of the run or checkpoint that run.init_from names.

    Args:
      file: YAML file of the config.
      overrides: --section.key VALUE, as for the command itself.
      command: command that reads the config file.
      origins: add a comment with the origin of each value.
      changed: show only values that are not defaults.
    """
    root, entry = reads_config(command)
    given = overrides_from(overrides)
    mapping = apply_overrides(load_yaml(file), given)
    resolved = to_mapping(_parser(entry, root)(mapping))
    lines = line_numbers(file.read_text(encoding="utf-8"))
    known = {key.name: key.default for key in config_keys(root, entry.provider) if not key.selections}
    written = {override.partition("=")[0] for override in given}

    def origin(path: str, value: Any) -> str:
        # `objective: grpo` sets objective.name.
        is_given = _value_at(mapping, path) is not None or path in lines
        is_given |= isinstance(value, str) and _value_at(mapping, path.rpartition(".")[0] or path) == value
        nearest = next((each for each in _with_parents(path) if each in written or each in lines), None)
        if is_given and nearest is not None:
            return "command line" if nearest in written else f"{file.name}:{lines[nearest]}"
        section = path.partition(".")[0]
        is_start = _start_of(mapping) is not None and (
            section == "model" or (path in known and value != known[path] and value is not None)
        )
        return "start" if is_start else "default"

    if changed:
        resolved = _without_defaults(resolved, "", origin)
    text = to_yaml(resolved)
    print(_annotated(text, resolved, origin) if origins else text, end="")


def line_numbers(text: str) -> dict[str, int]:
    """Returns the line of each dotted key of a YAML mapping, from 1."""
    return {path: node.start_mark.line + 1 for path, node, _ in _nodes(yaml.compose(text, yaml.SafeLoader), "")}


def _nodes(node: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key, value
            yield from _nodes(value, f"{path}.")


def _with_parents(path: str) -> Iterator[str]:
    """Yields a path, then its parents, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _start_of(mapping: Mapping[str, Any]) -> Any:
    run = mapping.get("run")
    return run.get("init_from") if isinstance(run, Mapping) else None


def _value_at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _without_defaults(mapping: Mapping[str, Any], prefix: str, origin: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            if inside := _without_defaults(value, f"{path}.", origin):
                shown[key] = inside
        elif origin(path, value) != "default":
            shown[key] = value
    return shown


def _annotated(text: str, resolved: Mapping[str, Any], origin: Any) -> str:
    """Adds the origin of each value to its line as a comment, or above a text that spans several lines."""
    notes: dict[int, tuple[str, bool]] = {}
    for path, key, node in _nodes(yaml.compose(text, yaml.SafeLoader), ""):
        if isinstance(node, yaml.MappingNode) and node.value:
            continue
        spans = isinstance(node, yaml.ScalarNode) and node.end_mark.line > node.start_mark.line
        notes[key.start_mark.line] = origin(path, _value_at(resolved, path)), spans
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        note, spans = notes.get(number, ("", False))
        indent = line[: len(line) - len(line.lstrip())]
        lines += [f"{indent}# {note}", line] if spans else [f"{line:<48}  # {note}" if note else line]
    return "\n".join(lines) + "\n"


def _parser(entry: Entry, root: Any) -> Any:
    """Returns the function with which the command parses a mapping."""
    if "parse" not in entry.details:
        return lambda mapping: parse(root, mapping)
    module, _, name = entry.details["parse"].partition(":")
    return getattr(importlib.import_module(module), name)
