"""Writes the reference of the site from the packages: public names, config keys, commands, registered names."""

import importlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from stack_core import cli
from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.plugins import registries
from stack_core.chips import Chip
from stack_core.commands.config_keys import config_keys
from stack_quant.recipes import load_recipe, recipe_names
from stack_train.run.config import RunConfig

__all__ = ["write_reference"]

PACKAGES = ("core", "kernels", "quant", "train", "rl", "serve", "profile")
CONSTRAINTS = Path(__file__).parents[1] / "constraints"


def write_reference(folder: Path) -> None:
    """Writes one page for each kind of names, and an index of the pages."""
    folder.mkdir(exist_ok=True)
    pages = {
        "names": _names(),
        "keys": _keys(),
        "commands": _commands(),
        "supported": _supported(),
        "registered": _registered(),
    }
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
    yield from ("# Commands", "", "The output of `stack COMMAND --help` for each command.")
    for entry in registries.commands.entries():
        yield from ("", f"## stack {entry.name}", "", "```text", _help(entry.name), "```")


def _help(command: str) -> str:
    output = io.StringIO()
    cli._app(command).help_print(command.split(), console=Console(file=output, width=100))
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())


def _supported() -> Iterator[str]:
    yield from ("# Supported models, formats, chips", "", "## Models", "")
    yield from ("| family | architecture in config.json | published sizes | compared in tests |", "|---|---|---|---|")
    for name in registries.models.names():
        family = registries.models[name]
        architecture = getattr(getattr(family, "config_map", None), "architecture", "-")
        sizes, tested = (", ".join(getattr(family, each, ())) or "-" for each in ("sizes", "tested"))
        yield f"| `{name}` | {architecture} | {sizes} | {tested} |"
    yield from ("", "## Formats of weights", "", "Types: [quantized](../quantized.md), [GGUF](../gguf.md).", "")
    yield from [f"- `{entry.name}:` ({entry.provider})" for entry in registries.model_formats.entries()]
    yield from ("", "## Quantization recipes", "")
    yield from ("| recipe | weights | activations | inputs per scale |", "|---|---|---|---|")
    for name in recipe_names():
        rules = load_recipe(name)
        columns = [[str(getattr(rule, key)) for rule in rules] for key in ("weights", "activations", "tile_size")]
        yield f"| `{name}` | {' | '.join(', '.join(dict.fromkeys(column)) for column in columns)} |"
    yield from ("", "## Chips", "", "Dense peaks in TFLOP/s. Kernels: [by chip](../accelerators.md).", "")
    yield from ("| chip | bf16 | int8 | memory, GiB | memory, GB/s | source |", "|---|---|---|---|---|---|")
    for name in registries.chips.names():
        chip = registries.chips[name]
        if isinstance(chip, Chip):
            peaks = [_scaled(chip.peak_flops.get(dtype), 1e12) for dtype in ("bfloat16", "int8")]
            sizes = [_scaled(chip.hbm_bytes, 2**30), _scaled(chip.hbm_bandwidth_bytes_s, 1e9)]
            yield f"| `{name}` | {' | '.join([*peaks, *sizes])} | {_escaped(chip.provenance)} |"
    yield from ("", "## Versions of Python", "", "| Python | tested with |", "|---|---|")
    for path in sorted(CONSTRAINTS.glob("py*.txt")):
        pins = re.findall(r"^(?:jax|flax|optax|numpy)==\S+", path.read_text(encoding="utf-8"), re.MULTILINE)
        yield f"| 3.{path.stem.removeprefix('py3')} | {', '.join(pins)} |"


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.4g}"


def _registered() -> Iterator[str]:
    yield from ("# Registered names", "", "Names of each registry with the packages that register them.")
    for kind in REGISTRY_KINDS:
        entries = getattr(registries, kind).entries()
        yield from ("", f"## {kind}", "", f"Hook: [`stack_register_{kind}`](../hooks.md#stack_register_{kind}).", "")
        yield from [f"- `{entry.name}` ({entry.provider})" for entry in entries] or ["None."]


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("<", r"\<").replace("[", r"\[").replace("|", r"\|").replace("$", r"\$")
