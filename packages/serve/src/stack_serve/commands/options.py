"""Options of `stack serve`, which belong to different configs."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from stack_core.abi.errors import ConfigError

__all__ = ["check_known", "flags_of", "select_options"]


def select_options(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the options that are fields of a config class."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in options.items() if name in names}


def check_known(options: Collection[str], known: Collection[str], problem: str) -> None:
    """Raises ConfigError if an option does not apply."""
    if foreign := sorted(set(options).difference(known)):
        raise ConfigError(f"{flags_of(foreign)}: {problem}.")


def flags_of(options: Collection[str]) -> str:
    """Formats options as a command line has them, such as "--max-tokens, --pages"."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in options)
