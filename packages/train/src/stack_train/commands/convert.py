"""`stack convert`: weights between run directories and other model formats."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stack_core.contracts.formats import ExportsRuns, ExportsStored, ImportsAdapters, ImportsRuns
from stack_core.errors import ConversionError, nearest
from stack_core.plugins import registries

__all__ = ["convert"]


def convert(
    source: str,
    destination: str,
    /,
    *,
    base: Path | None = None,
    stored: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Convert weights: stack convert hf:DIR RUN, or stack convert RUN hf:DIR

    Nothing is overwritten, and a conversion that fails leaves nothing behind. A run with adapters becomes a
    Hugging Face checkpoint or another run (`run:DIR`) with the adapters merged, or a directory of PEFT with the
    adapters alone.

    Args:
      source: a run directory, or a format and a path: `hf:DIR`, a Hugging Face checkpoint or a diffusers directory;
        `peft:DIR`, an adapter; `gguf:FILE`, a model of llama.cpp; or the format of a plugin.
      destination: the other of the two; it must not exist.
      base: the run that holds the model which an adapter is for; by default the one that the adapter names.
      stored: what matrices are stored as, of formats that offer a choice: F16, Q8_0 or Q4_0 in GGUF.
      json: print machine-readable results.
    """
    from_format, from_path = _split(source, ImportsRuns)
    to_format, to_path = _split(destination, ExportsRuns)
    if (from_format is None) == (to_format is None):
        raise ConversionError(
            f"Cannot convert {source!r} to {destination!r}: one of the two is a run directory, the other FORMAT:DIR "
            f"with a format among {', '.join(_formats(ImportsRuns, ExportsRuns))}."
        )
    if base is not None and not isinstance(from_format, ImportsAdapters):
        raise ConversionError(f"--base is for adapters, and {source!r} is none. Leave it out.")
    if stored is not None and not isinstance(to_format, ExportsStored):
        raise ConversionError(f"--stored is for formats that store in several types, and {destination!r} is none.")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("converting", total=None)

        def report(path: str, done_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=path, completed=done_bytes, total=total_bytes)

        if from_format is not None:
            based = {} if base is None else {"base": base}
            result = from_format.import_run(from_path, to_path, progress=report, **based)
        else:
            chosen = {} if stored is None else {"stored": stored}
            result = to_format.export_run(from_path, to_path, progress=report, **chosen)
    if json:
        print(json_format.dumps(dataclasses.asdict(result), default=str))
        return
    kept = f"; kept {', '.join(result.kept)}" if result.kept else "; it has no tokenizer"
    kept = "" if isinstance(from_format or to_format, ImportsAdapters) else kept
    print(f"{result.destination}: {result.parameters:,} parameters in {result.dtype}{kept}")


def _split(address: str, ability: type) -> tuple[Any, Path]:
    """Returns the model format that an address names, or None for a run directory, and the path.

    Raises:
      ConversionError: there is no such format, or it lacks `ability`, `ImportsRuns` or `ExportsRuns`.
    """
    scheme, separator, path = address.partition(":")
    if not separator or "/" in scheme:
        return None, Path(address)
    able = _formats(ability)
    if scheme not in _formats(ImportsRuns, ExportsRuns):
        known = ", ".join(able)
        raise ConversionError(f"Unknown model format {scheme!r} in {address!r}.{nearest(scheme, able)} Known: {known}.")
    if scheme not in able:
        direction = "read as a source" if ability is ImportsRuns else "written as a destination"
        raise ConversionError(
            f"The format {scheme!r} of {address!r} cannot be {direction}: it has no "
            f"`{'import_run' if ability is ImportsRuns else 'export_run'}`. Formats that can: {', '.join(able)}."
        )
    return registries.model_formats[scheme], Path(path)


def _formats(*abilities: type) -> tuple[str, ...]:
    """Returns the names of the formats that have any of these abilities."""
    return tuple(name for name, format_ in registries.model_formats.items() if isinstance(format_, abilities))
