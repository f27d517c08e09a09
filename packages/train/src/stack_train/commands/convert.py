"""`stack convert`: weights between run directories and other model formats."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stack_core.abi.formats import ExportsAdapters, ExportsRuns, ImportsAdapters, ImportsRuns
from stack_train.conversion import convert as convert_weights
from stack_train.conversion import format_of

__all__ = ["convert"]


def convert(  # noqa: PLR0913, each parameter is an option of the command
    source: str,
    destination: str,
    /,
    *,
    base: Path | None = None,
    base_model: str | None = None,
    ignore: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    denoiser: str | None = None,
    stored: str | None = None,
    importance: Path | None = None,
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
      denoiser: gguf:FILE with the weights of the denoiser of a FLUX directory, in place of the directory's.
      stored: form of stored matrices, for formats with a choice: F16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0 in GGUF;
        compressed-tensors, gptq or awq for a quantized run in hf:DIR.
      importance: mean squared inputs of the matrices, which are then quantized with less error in the important
        columns: a file of `stack quantize RUN --importance`, or llama.cpp's imatrix in GGUF.
      json: print the result as JSON.
    """
    given: dict[str, Any] = {"base": base, "ignore": ignore, "base_model": base_model}
    given |= {"denoiser": denoiser, "stored": stored, "importance": importance}
    options = {name: value for name, value in given.items() if value not in (None, ())}
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

        result = convert_weights(source, destination, progress=report, **options)
    if json:
        print(json_format.dumps(dataclasses.asdict(result), default=str))
        return
    (from_format, _), (to_format, _) = format_of(source, ImportsRuns), format_of(destination, ExportsRuns)
    kept = f"; copied {', '.join(result.kept)}" if result.kept else "; without a tokenizer"
    kept = "" if isinstance(from_format or to_format, ImportsAdapters) else kept
    print(f"{result.destination}: {result.parameters:,} parameters in {result.dtype}{kept}")
    if result.left_out:
        print(f"left out: {', '.join(result.left_out)}")
    if isinstance(to_format, ExportsAdapters) and base_model is None:
        print("The adapter names its base by the run. For transformers, give --base-model NAME, such as ORG/MODEL.")
