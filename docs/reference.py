"""Writes the reference of the site: public names, config keys, commands and registered names, from the packages."""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.plugins import registries
from stack_core.commands.config_keys import config_keys
from stack_train.run.config import RunConfig

__all__ = ["write_reference"]

PACKAGES = ("core", "kernels", "quant", "train", "rl", "serve", "profile")


def write_reference(folder: Path) -> None:
    """Writes one page for each kind of names, and an index of the pages."""
    folder.mkdir(exist_ok=True)
    pages = {"names": _names(), "keys": _keys(), "commands": _commands(), "registered": _registered()}
    for name, lines in pages.items():
        _write(folder / f"{name}.md", "\n".join(lines) + "\n")
    index = ["# Reference", "", "Generated from the packages.", "", "```{toctree}", *pages, "```", ""]
    _write(folder / "index.md", "\n".join(index))


def _write(path: Path, text: str) -> None:
    """Writes a page only if it changed, because Sphinx builds changed pages again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _names() -> Iterator[str]:
    yield "# Public names"
    for package in PACKAGES:
        module = importlib.import_module(f"stack_{package}")
        yield from ("", f"## stack_{package}", "", "```text", inspect.cleandoc(module.__doc__ or ""), "```")
        for name in module.__all__:
            found = getattr(module, name)
            yield from ("", f"### stack_{package}.{name}", "", "```text", _signature(name, found))
            yield from ("", inspect.getdoc(found) or "", "```")


def _signature(name: str, found: object) -> str:
    try:
        return f"{name}{inspect.signature(found)}" if callable(found) else name  # pyrefly: ignore
    except (TypeError, ValueError):
        return name


def _keys() -> Iterator[str]:
    keys = config_keys(RunConfig, "train")
    yield from ("# Config keys", "", f"The {len({key.name for key in keys})} keys of the config of `stack train`.")
    sections = dict.fromkeys(key.name.partition(".")[0].removesuffix("[]") for key in keys)
    for section in sections:
        yield from ("", f"## {section}", "")
        rows = [key for key in keys if key.name.partition(".")[0].removesuffix("[]") == section]
        for key in rows:
            condition = f", if {key.selector} is {' or '.join(key.selections)}" if key.selections else ""
            default = "required" if key.required else f"default `{key.default}`"
            yield f"- `{key.name}`: {_escaped(key.text)} (`{key.type}`, {default}{condition})"


def _commands() -> Iterator[str]:
    yield "# Commands"
    for entry in registries.commands.entries():
        text = inspect.getdoc(registries.commands[entry.name]) or entry.details.get("help", "")
        yield from ("", f"## stack {entry.name}", "", "```text", text, "```")


def _registered() -> Iterator[str]:
    yield from ("# Registered names", "", "Names of each registry with the packages that register them; see the hooks.")
    for kind in REGISTRY_KINDS:
        entries = getattr(registries, kind).entries()
        yield from ("", f"## {kind}", "")
        yield from [f"- `{entry.name}` ({entry.provider})" for entry in entries] or ["None."]


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("<", r"\<").replace("[", r"\[").replace("|", r"\|").replace("$", r"\$")
