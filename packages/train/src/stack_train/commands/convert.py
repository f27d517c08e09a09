"""`stack convert`: weights between run directories and other model formats."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stack_core.contracts.formats import ExportsStored, ImportsAdapters, ImportsRuns
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
    Hugging Face checkpoint with the adapters merged, or a directory of PEFT with the adapters alone.

    Args:
      source: a run directory, or a format and a path: `hf:DIR`, a Hugging Face checkpoint or a diffusers directory;
        `peft:DIR`, an adapter; `gguf:FILE`, a model of llama.cpp.
      destination: the other of the two; it must not exist.
      base: the run that holds the model which an adapter is for; by default the one that the adapter names.
      stored: what matrices are stored as, of formats that offer a choice: F16, Q8_0 or Q4_0 in GGUF.
      json: print machine-readable results.
    """
    from_format, from_path = _split(source)
    to_format, to_path = _split(destination)
    if (from_format is None) == (to_format is None):
        raise ConversionError(
            f"Cannot convert {source!r} to {destination!r}: one of the two is a run directory, the other FORMAT:DIR "
            f"with a format among {', '.join(_convertible())}."
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


def _split(address: str) -> tuple[Any, Path]:
    """Returns the model format that an address names, or None for a run directory, and the path."""
    scheme, separator, path = address.partition(":")
    if not separator or "/" in scheme:
        return None, Path(address)
    known = _convertible()
    if scheme not in known:
        raise ConversionError(
            f"Unknown model format {scheme!r} in {address!r}.{nearest(scheme, known)} Known: {', '.join(known)}."
        )
    return registries.model_formats[scheme], Path(path)


def _convertible() -> tuple[str, ...]:
    formats = registries.model_formats
    return tuple(name for name in formats.names() if isinstance(formats[name], ImportsRuns))
