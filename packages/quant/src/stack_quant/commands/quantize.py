"""`stack quantize`: quantizes a trained model by a recipe and measures its loss before and after."""

import contextlib
import dataclasses
import json as json_format
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stack_quant.calibration import STREAM_BATCHES

__all__ = ["quantize"]


def quantize(
    source: str,
    /,
    *,
    recipe: str | None = None,
    algorithm: str | None = None,
    out: Path,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int = 32,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Quantize a trained model: stack quantize RUN --recipe w4a8 --out DIR

    DIR is a run directory that `stack generate` reads. The loss is the model's training objective on held-out data.

    Args:
      source: a run directory, or a directory with a Hugging Face checkpoint; FORMAT:DIR if the format is ambiguous.
      recipe: a YAML file of rules, or w8a8, w4, w4a8, w4_t128, w4a8_t128, nf4 or fp8; by default the recipe of the
        model's training.
      algorithm: algorithms for the weights: nearest, gptq, hqq, awq, smoothquant, hadamard, with options as in
        gptq,damp=0.02, or joined as hadamard+gptq; by default the recipe's own.
      out: the directory to write; it must not exist.
      data: documents for calibration and evaluation, as SOURCE or SOURCE:ADDRESS; by default the run's own data.
      calibration_batches: number of training batches for static ranges and algorithms, if the recipe has any.
      evaluation_batches: maximum number of held-out batches for measuring the loss; 0 skips the measurement.
      json: print the results and the rows of the report as JSON.
    """
    from stack_core.runtime.compile_cache import keep_compiled
    from stack_quant.checkpoint import quantize_checkpoint  # imports JAX, which would slow down `stack --help`

    keep_compiled()
    with _progress() as told:
        result = quantize_checkpoint(
            source,
            recipe,
            out,
            algorithm=algorithm,
            data=data,
            calibration_batches=calibration_batches,
            evaluation_batches=evaluation_batches,
            progress=told,
        )
    if json:
        print(json_format.dumps({**_summary(result), "rows": result.report.rows()}, default=str))
        return
    print(result.report)
    print(f"loss on held-out data: {_loss(result)}")
    print(f"{result.destination}: {result.report.bytes_after:,} bytes of parameters")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Reports progress on standard error: as a bar on a terminal, otherwise as one line per stage."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda stage, finished, total: None if finished else console.print(stage, markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, finished, total: bar.update(task, description=stage, completed=finished, total=total)


def _summary(result: Any) -> dict[str, Any]:
    facts = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "report"}
    return {**facts, "bytes_before": result.report.bytes_before, "bytes_after": result.report.bytes_after}


def _loss(result: Any) -> str:
    if result.loss_before is None:
        return "not measured: there is no held-out data, or --evaluation-batches is 0"
    change = result.loss_after / result.loss_before - 1
    return f"{result.loss_before:.4f} before, {result.loss_after:.4f} after ({change:+.2%}), {result.targets:,} tokens"
