"""`stack config`: the keys that config files accept."""

import dataclasses
import json as json_format
import textwrap
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from stack_core.abi.errors import UnknownName, nearest
from stack_core.commands.config_keys import Key, config_keys, reads_config

__all__ = ["explain", "keys"]

_COLUMNS = 110


def keys(prefix: str = "", /, *, command: str = "train", json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the keys that a config file accepts: stack config keys run

    Args:
      prefix: key, section or beginning of a key to list; all keys by default.
      command: command that reads the config file.
      json: print machine-readable results.
    """
    known = _keys(command)
    found = [key for key in known if key.name.startswith(prefix)] or _under(known, prefix)
    if json:
        print(json_format.dumps([dataclasses.asdict(key) for key in found], indent=2, default=str))
        return
    rows = [(key.name, key.type, _default(key), _summary(key)) for key in found]
    widths = [min(max(len(row[column]) for row in rows), limit) for column, limit in enumerate((34, 20, 14))]
    for row in rows:
        cells = [_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(_cut("  ".join([*cells, row[3]]), _COLUMNS))
    print(f"{len({key.name for key in found})} keys. `stack config explain KEY` prints the whole text of one.")


def explain(key: str, /, *, command: str = "train", json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Explain a config key: stack config explain run.steps

    Args:
      key: dotted path of the key.
      command: command that reads the config file.
      json: print machine-readable results.
    """
    known = _keys(command)
    found = [each for each in known if each.name == key]
    if not found:
        found = _under(known, key)
        inside = ", ".join(dict.fromkeys(each.name for each in found))
        raise UnknownName(f"{key!r} is a section, not a key. It has: {inside}.")
    if json:
        print(json_format.dumps([dataclasses.asdict(each) for each in found], indent=2, default=str))
        return
    for each in found:
        print(each.name)
        facts = {
            "type": each.type,
            "default": _default(each),
            "if": f"{each.selector} is {' or '.join(each.selections)}" if each.selections else "",
            "plugin": ", ".join(each.plugins),
        }
        for text in (each.text, *(f"{name}: {value}" for name, value in facts.items() if value)):
            print(textwrap.fill(text, _COLUMNS, initial_indent="  ", subsequent_indent="    "))


def _keys(command: str) -> list[Key]:
    root, entry = reads_config(command)
    return config_keys(root, entry.provider)


def _under(found: Sequence[Key], prefix: str) -> list[Key]:
    selected = [
        key for key in found if not prefix or key.name == prefix or key.name.startswith((f"{prefix}.", f"{prefix}[]"))
    ]
    if not selected:
        names = {key.name for key in found}
        sections = {name.rpartition(".")[0] for name in names} - {""}
        raise UnknownName(
            f"There is no config key {prefix!r}.{nearest(prefix, names | sections)} `stack config keys` lists all."
        )
    return selected


def _default(key: Key) -> str:
    return "required" if key.required else json_format.dumps(key.default, default=str)


def _summary(key: Key) -> str:
    if not key.selections:
        return key.text
    more = f" +{len(key.selections) - 1}" if len(key.selections) > 1 else ""
    return f"[{key.selections[0]}{more}] {key.text}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
