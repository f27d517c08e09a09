"""`stack quantize`: quantizes a trained model by a recipe or a budget and measures its loss before and after."""

import contextlib
import dataclasses
import json as json_format
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stack_quant.calibration import STREAM_BATCHES

__all__ = ["quantize"]


def quantize(  # noqa: PLR0913, each parameter is an option of the command
    source: str,
    /,
    *,
    recipe: str | None = None,
    algorithm: str | None = None,
    budget: str | None = None,
    types: str | None = None,
    sweep: Annotated[bool, Parameter(negative=())] = False,
    importance: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Quantize a trained model: stack quantize RUN --recipe w4a8, or --budget 3.5bits

    It writes a run directory that `stack generate` and `stack serve` read. The loss is the model's training objective
    on held-out data.

    Args:
      source: a run directory, or a directory with a Hugging Face checkpoint; FORMAT:DIR if the format is ambiguous.
      recipe: a YAML file of rules, or w8a8, w4, w4a8, w4_t128, w4a8_t128, nf4 or fp8; by default the recipe of the
        model's training.
      algorithm: algorithms for the weights: nearest, gptq, autoround, hqq, qep, awq, smoothquant, hadamard, with
        options as in gptq,damp=0.02, or joined as qep+gptq; by default the recipe's own.
      budget: instead of a recipe, a limit on the parameters, such as 3.5bits (each), 500MB or 2GB. The type of each
        parameter is chosen by its effect on the model's outputs.
      types: types to choose from, such as int3/t128,int4/t32,int8,float; t32 is the number of inputs that share a
        scale.
      sweep: write no run but an HTML file with the loss and bytes of every recipe and type by every algorithm.
        Restrict the sweep by --recipe, --types and --algorithm.
      importance: write no run but a file with the mean squared inputs of each matrix over the calibration batches, for
        `stack convert RUN gguf:FILE --stored Q4_K_M --importance FILE`.
      out: the directory to write, by default RUN-w4a8 for the recipe w4a8; or the file of a sweep or of the importance.
        It must not exist.
      data: documents for calibration and evaluation, as SOURCE or SOURCE:ADDRESS; by default the run's own data.
      calibration_batches: number of training batches for static ranges, algorithms and the importance.
      evaluation_batches: maximum number of held-out batches for measuring the loss, by default 32; 0 skips the
        measurement.
      json: print the results and the rows of the report as JSON.
    """
    from stack_core.runtime.compile_cache import keep_compiled
    from stack_quant import checkpoint  # imports JAX, which would slow down `stack --help`

    keep_compiled()
    options: Any = {
        "data": data,
        "calibration_batches": calibration_batches,
        "evaluation_batches": 32 if evaluation_batches is None else evaluation_batches,
    }
    names = None if types is None else tuple(name.strip() for name in types.split(","))
    if importance:
        options = {"recipe": recipe, "budget": budget, "types": types, "algorithm": algorithm, "sweep": sweep or None}
        _check_importance_options(**options, evaluation_batches=evaluation_batches)
        _measure(source, _file(out, "--importance"), data, calibration_batches, json)
        return
    if sweep:
        _sweep(source, _file(out, "--sweep"), (recipe, names, algorithm), budget, options, json)
        return
    chosen = _rules_of(recipe, budget, names)
    with _progress() as told:
        result = checkpoint.quantize(source, chosen, out=out, algorithm=algorithm, progress=told, **options)
    if json:
        print(json_format.dumps({**_summary(result), "rows": result.report.rows()}, default=str))
        return
    if result.sensitivity is not None:
        print(result.sensitivity.table(result.chosen))
    print(result.report)
    print(f"loss on held-out data: {_loss(result)}")
    print(f"{result.destination}: {result.report.bytes_after:,} bytes of parameters")


def _rules_of(recipe: str | None, budget: str | None, types: Sequence[str] | None) -> Any:
    """Returns the budget or the recipe; both of them, and types without a budget, are errors."""
    from stack_quant.errors import QuantError
    from stack_quant.mixed.types import TYPES, Budget

    if budget is None:
        if types is not None:
            raise QuantError("--types are the types that --budget chooses from. Give a budget, or leave --types out.")
        return recipe
    if recipe is not None:
        raise QuantError(
            f"--budget {budget} chooses the type of each parameter, and so does --recipe {recipe}. Leave out one."
        )
    return Budget(budget, types or TYPES)


def _file(out: Path | None, option: str) -> Path:
    from stack_quant.errors import QuantError

    if out is None:
        raise QuantError(f"{option} writes a file. Name it by --out FILE.")
    return out


def _check_importance_options(**options: Any) -> None:
    from stack_quant.errors import QuantError

    if chosen := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise QuantError(
            f"--importance measures the model in floating point and quantizes nothing. Leave {', '.join(chosen)} out."
        )


def _measure(source: str, out: Path, data: str | None, batches: int, json: bool) -> None:
    """Writes the importance of a model's matrices, and prints what was measured."""
    from stack_quant.importance import write_importance  # imports JAX, as below

    with _progress() as told:
        found = write_importance(source, out, data=data, batches=batches, progress=told)
    if json:
        facts = {"destination": str(out), "parameters": list(found.mean_squares), "left": dict(found.left)}
        print(json_format.dumps(facts))
        return
    for path, reason in found.left.items():
        print(f"{path} is left out: {reason}")
    print(f"{out}: importance of {len(found.mean_squares)} parameters")


def _sweep(
    source: str,
    out: Path,
    selection: "tuple[str | None, Sequence[str] | None, str | None]",
    budget: str | None,
    options: dict[str, Any],
    json: bool,
) -> None:
    """Writes a sweep over a recipe, types and an algorithm, or over the defaults; prints its rows."""
    from stack_quant.errors import QuantError
    from stack_quant.sweep import Selection, sweep_checkpoint  # imports JAX, as above

    if budget is not None:
        raise QuantError(f"--budget {budget}: a sweep chooses its own budgets. Leave one of both out.")
    with _progress() as told:
        found = sweep_checkpoint(source, out, Selection.of(*selection), progress=told, **options)
    if json:
        print(json_format.dumps({"destination": str(out), "rows": [dataclasses.asdict(row) for row in found.rows]}))
        return
    for row in found.rows:
        result = row.note or f"{row.parameter_bytes:,} bytes, loss {row.loss:.4f} ({row.loss_change_share:+.2%})"
        print(f"{row.scheme}, {row.method or 'no method'}: {result}")
    print(f"{out}: {found.targets:,} held-out targets")


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
    others = ("report", "sensitivity", "chosen")
    facts = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name not in others
    }
    if result.sensitivity is not None:
        facts["sensitivity"] = result.sensitivity.rows(result.chosen)
    return {**facts, "bytes_before": result.report.bytes_before, "bytes_after": result.report.bytes_after}


def _loss(result: Any) -> str:
    if result.loss_before is None:
        return "not measured: there is no held-out data, or --evaluation-batches is 0"
    change = result.loss_after / result.loss_before - 1
    losses = f"{result.loss_before:.4f} before, {result.loss_after:.4f} after ({change:+.2%})"
    return f"{losses}, over {result.targets:,} targets"
