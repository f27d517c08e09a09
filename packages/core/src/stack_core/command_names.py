"""Names of the commands of `stack`, without the parser, which takes 0.2 s to import."""

import itertools
from collections.abc import Sequence

from stack_core.abi.plugins import registries

__all__ = ["command_name", "is_group", "uses_huge_pages"]


def command_name(tokens: Sequence[str]) -> str:
    """Returns the leading words that name a command or a group: "bench ops" for `bench ops --json FILE`."""
    name = ""
    for word in itertools.takewhile(lambda token: not token.startswith("-"), tokens):
        name = f"{name} {word}".lstrip()
        if not is_group(name):
            break
    return name


def is_group(name: str) -> bool:
    """Returns whether some commands begin with this name, as "bench ops" and "bench serve" begin with "bench"."""
    return any(known.startswith(f"{name} ") for known in registries.commands)


def uses_huge_pages(name: str) -> bool:
    """Returns whether a command runs programs whose memory should have huge pages."""
    return any(entry.name == name and entry.details.get("huge_pages") for entry in registries.commands.entries())
