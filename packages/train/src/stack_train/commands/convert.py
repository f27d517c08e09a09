"""`stack convert`: weights between run directories and other model formats."""

import dataclasses
import json as json_format
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stack_core.abi.errors import ConversionError, nearest
from stack_core.abi.formats import (
    ExportsAdapters,
    ExportsRuns,
    ExportsStored,
    IgnoresKeys,
    ImportsAdapters,
    ImportsRuns,
)
from stack_core.abi.local_paths import local_address
from stack_core.abi.plugins import registries

__all__ = ["convert"]


def convert(
    source: str,
    destination: str,
    /,
    *,
    base: Path | None = None,
    base_model: str | None = None,
    ignore: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    stored: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Convert weights: stack convert hf:DIR RUN, or stack convert RUN hf:DIR

    Nothing is overwritten, and a failed conversion leaves no files behind. A run with adapters is converted to a
    Hugging Face checkpoint or another run (`run:DIR`) with the adapters merged, or to a PEFT directory with only
    the adapters.

    Args:
      source: a run directory, or a format and a path: `hf:DIR`, a Hugging Face checkpoint or a diffusers directory;
        `peft:DIR`, an adapter; `gguf:FILE`, a model of llama.cpp; or the format of a plugin.
      destination: a run directory if the source is a format and a path, and vice versa; it must not exist.
      base: run with the base model of an adapter; by default the base that the adapter names.
      base_model: name of the base model to write into an adapter, such as meta-llama/Llama-3.1-8B or a directory that
        transformers can open; by default the run with the base, which transformers cannot open.
      ignore: a key of config.json to ignore; may be repeated.
      stored: dtype of stored matrices, for formats with a choice: F16, Q8_0 or Q4_0 in GGUF.
      json: print the result as JSON.
    """
    from_format, from_path = _split(source, ImportsRuns)
    to_format, to_path = _split(destination, ExportsRuns)
    if (from_format is None) == (to_format is None):
        raise ConversionError(
            f"Cannot convert {source!r} to {destination!r}: one of the two is a run directory, the other FORMAT:DIR "
            f"with a format among {', '.join(_formats(ImportsRuns, ExportsRuns))}."
        )
    reading = {name: value for name, value in {"base": base, "ignore": ignore}.items() if value}
    writing = {name: value for name, value in {"base_model": base_model, "stored": stored}.items() if value is not None}
    _check_options({**reading, **writing}, source, from_format, destination, to_format)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("converting", total=None)

        def report(path: str, finished_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=path, completed=finished_bytes, total=total_bytes)

        if from_format is not None:
            result = from_format.import_run(from_path, to_path, progress=report, **reading)
        else:
            result = to_format.export_run(from_path, to_path, progress=report, **writing)
    if json:
        print(json_format.dumps(dataclasses.asdict(result), default=str))
        return
    kept = f"; copied {', '.join(result.kept)}" if result.kept else "; without a tokenizer"
    kept = "" if isinstance(from_format or to_format, ImportsAdapters) else kept
    print(f"{result.destination}: {result.parameters:,} parameters in {result.dtype}{kept}")
    if result.left_out:
        print(f"left out: {', '.join(result.left_out)}")
    if isinstance(to_format, ExportsAdapters) and base_model is None:
        print("The adapter names its base by the run. For transformers, give --base-model NAME, such as ORG/MODEL.")


def _check_options(options: Mapping[str, Any], source: str, from_format: Any, destination: str, to_format: Any) -> None:
    """Raises a ConversionError if an option does not apply to the source or destination format."""
    uses = {
        "base": (from_format, ImportsAdapters, f"applies to adapters, but {source!r} is not an adapter. Leave it out"),
        "ignore": (from_format, IgnoresKeys, f"ignores keys of a config.json, but {source!r} does not have one"),
        "base_model": (to_format, ExportsAdapters, f"applies to written adapters, but {destination!r} is not one"),
        "stored": (to_format, ExportsStored, f"applies to formats with a choice of dtypes, unlike {destination!r}"),
    }
    for name in options:
        used_by, ability, problem = uses[name]
        if not isinstance(used_by, ability):
            raise ConversionError(f"--{name.replace('_', '-')} {problem}.")


def _split(address: str, ability: type) -> tuple[Any, Path]:
    """Splits an address into its model format, None for a run directory, and its path.

    Raises:
      ConversionError: the format does not exist, or does not implement `ability` (`ImportsRuns` or `ExportsRuns`).
    """
    address = local_address(address)
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
    """Returns the names of the formats that implement any of these protocols."""
    return tuple(name for name, format_ in registries.model_formats.items() if isinstance(format_, abilities))
