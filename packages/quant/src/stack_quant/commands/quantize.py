"""`stack quantize`: a trained model to one that is quantized by a recipe, measured before and after."""

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
    out: Path,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int = 32,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Quantize a trained model: stack quantize RUN --recipe w4a8 --out DIR

    DIR is a run directory that `stack generate` reads. Losses are those of the model's own objective on data that was
    held out.

    Args:
      source: a run directory, or one with a Hugging Face checkpoint; FORMAT:DIR where it could be several.
      recipe: a YAML file of rules, or w8a8, w4, w4a8, nf4 or fp8; by default that which the model was trained by.
      out: the directory to write; it must not exist.
      data: documents to calibrate and measure on, as SOURCE or SOURCE:ADDRESS; by default those that the run has.
      calibration_batches: of the data, over which the static ranges are measured that the recipe may ask for.
      evaluation_batches: of held-out data, at most; 0 measures nothing.
      json: print the results, and the report's rows, as JSON.
    """
    from stack_core.runtime.compile_cache import keep_compiled
    from stack_quant.checkpoint import quantize_checkpoint  # imports jax, which `stack --help` should not wait for

    keep_compiled()
    with _progress() as told:
        result = quantize_checkpoint(
            source,
            recipe,
            out,
            data=data,
            calibration_batches=calibration_batches,
            evaluation_batches=evaluation_batches,
            progress=told,
        )
    if json:
        print(json_format.dumps({**_facts(result), "rows": result.report.rows()}, default=str))
        return
    print(result.report)
    print(f"loss on held-out data: {_loss(result)}")
    print(f"{result.destination}: {result.report.bytes_after:,} bytes of parameters")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, a line a stage elsewhere; on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None if done else console.print(stage, markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def _facts(result: Any) -> dict[str, Any]:
    facts = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "report"}
    return {**facts, "bytes_before": result.report.bytes_before, "bytes_after": result.report.bytes_after}


def _loss(result: Any) -> str:
    if result.loss_before is None:
        return "not measured, as nothing is held out, or --evaluation-batches is 0"
    change = result.loss_after / result.loss_before - 1
    return f"{result.loss_before:.4f} before, {result.loss_after:.4f} after ({change:+.2%}), {result.targets:,} tokens"
