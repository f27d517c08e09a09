"""Quantization of checkpoints in any registered model format, with the loss before and after."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.config import differences, to_mapping
from stack_core.abi.errors import ConversionError, StackError, nearest
from stack_core.abi.formats import TrainedModel
from stack_core.abi.model_formats import open_model
from stack_core.report.markup import element
from stack_quant.batch_calls import call_on_batches
from stack_quant.calibration import STREAM_BATCHES, check_batches
from stack_quant.errors import QuantError
from stack_quant.evaluation import Evaluation
from stack_quant.mixed.sensitivity import Candidate, Sensitivity, measure_sensitivity
from stack_quant.mixed.types import Budget
from stack_quant.model import quantize_model, report
from stack_quant.recipes import Rules, as_rules, recipe_names
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig
from stack_quant.transform.coverage import Report

__all__ = ["QuantizedCheckpoint", "check_finite", "first_batch", "quantize", "quantize_checkpoint"]

_SECTION = "quant"

Batch = Mapping[str, Any]
Progress = Callable[[str, int, int], None]


def _ignore_progress(stage: str, finished: int, total: int) -> None:
    """Ignores progress (the default `Progress`)."""


@dataclass(frozen=True, repr=False)
class QuantizedCheckpoint:
    """Result of `quantize_checkpoint`.

    Attributes:
      destination: run directory that was written.
      report: coverage report of the quantization.
      loss_before, loss_after: mean losses over the same held-out targets, or None without such targets.
      targets: number of held-out targets.
      sensitivity: sensitivity table of a quantization by a budget, else None.
      chosen: type of each site of the table, by path.
    """

    destination: Path
    report: Report
    loss_before: float | None
    loss_after: float | None
    targets: int
    sensitivity: Sensitivity | None = None
    chosen: Mapping[str, Candidate] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<QuantizedCheckpoint {self._losses()}; {repr(self.report).strip('<>')}>"

    def _repr_html_(self) -> str:
        return str(element("p", self._losses())) + self.report._repr_html_()

    def _losses(self) -> str:
        if self.loss_before is None or self.loss_after is None:
            return f"{self.destination}: no held-out targets"
        losses = f"{self.loss_before:.4f} before, {self.loss_after:.4f} after"
        return f"{self.destination}: loss of {self.targets:,} held-out targets {losses}"


def quantize(
    source: Any, recipe: Rules | Budget | None = None, *, out: str | Path | None = None, **options: Any
) -> QuantizedCheckpoint:
    """Quantizes a run or a checkpoint, as `stack quantize` does: `quantize("runs/mine", "w4a8")`.

    See `quantize_model` and `quantize_function` for models in memory.

    Args:
      source: address of the model, "DIR" or "FORMAT:DIR".
      recipe: name of a recipe, path of a YAML file, or rules as `Rule` or mappings; or a budget, such as
        `Budget("3.5bits")`. None uses the recipe of the model's quantized training.
      out: run directory to write, which must not exist; None appends the name of the recipe or the budget to the
        source, runs/mine-w4a8 or runs/mine-3.5bits, and for the model's own recipe runs/mine-quantized.
      options: other options of `quantize_checkpoint`, such as `algorithm="gptq"`.

    Raises:
      QuantError: `source` is not an address, an option is unknown, or `out` is None for rules without a name.
      StackError: as `quantize_checkpoint`.
    """
    if not isinstance(source, str | Path):
        raise QuantError(
            f"source is a {type(source).__name__}; expected the address of a run or checkpoint. Use quantize_model for "
            "a model, quantize_function for a function of parameters, quantize_array for an array."
        )
    known = list(inspect.signature(quantize_checkpoint).parameters)[3:]
    if unknown := [name for name in options if name not in known]:
        hint = nearest(unknown[0], [*known, "recipe", "out"])
        raise QuantError(f"There is no option {unknown[0]!r}.{hint} There are: {', '.join(known)}.")
    if out is None:
        if not isinstance(recipe, str | Budget | None):
            raise QuantError(
                "The destination has no default without a budget or the name of a recipe. Set out to a new directory."
            )
        name = recipe.text if isinstance(recipe, Budget) else Path(recipe or "quantized").stem
        out = f"{str(source).rpartition(':')[2].rstrip('/')}-{name}"
    return quantize_checkpoint(str(source), recipe, Path(out), **options)


def quantize_checkpoint(
    source: str,
    recipe: Rules | Budget | None,
    destination: Path,
    *,
    algorithm: str | None = None,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int = 32,
    progress: Progress = _ignore_progress,
) -> QuantizedCheckpoint:
    """Quantizes the model in a directory and writes a run directory.

    Args:
      source: "DIR" or "FORMAT:DIR".
      recipe: name of a recipe in `stack_quant.recipes`, path of a YAML file, or rules; or a budget, with which each
        parameter gets the type that `Sensitivity.choose` finds. None uses the recipe of the model's quantized training.
      destination: run directory to write, which must not exist.
      algorithm: algorithm of all rules with weights, as in `Rule`; "nearest" rounds. None uses the recipe's own, and
        rounds with a warning if it cannot quantize the model. The sensitivity for a budget is measured by rounding.
      data: address of the documents for calibration and evaluation; None uses the model's data.
      calibration_batches: number of training batches for static ranges and algorithms.
      evaluation_batches: maximum number of held-out batches for the loss; 0 skips the measurement.
      progress: callback with the name of the current stage, its completed steps and its total steps.

    Raises:
      ConversionError: no format recognizes the directory, or `destination` exists.
      QuantError: parameters contain NaN or infinities (the message lists them), the recipe contradicts the recipe
        of the model's quantized training, or the budget is below the smallest types.
      ArgumentError: a number of batches is too small.
      StackError: the recipe, the checkpoint or the data cannot be used.
    """
    # Before the model is read and measured, which may take long.
    check_batches(calibration_batches=calibration_batches, evaluation_batches=evaluation_batches)
    if destination.exists():
        raise ConversionError(f"{destination} exists already and is not overwritten. Choose a new directory.")
    if (file := next((each for each in destination.parents if each.is_file()), None)) is not None:
        raise ConversionError(f"{destination} cannot be created: {file} is a file. Choose a new directory.")
    budget = recipe if isinstance(recipe, Budget) else None
    given = None if recipe is None or isinstance(recipe, Budget) else as_rules(recipe)
    progress("reading the model", 0, 1)
    trained = open_model(source, data=data)
    rules = () if budget is not None else _rules(source, trained.sections.get(_SECTION), given)
    if budget is not None:
        _check_untrained(source, trained.sections)
    elif algorithm is not None:
        rules = tuple(replace(rule, algorithm=rule.weights and algorithm) for rule in rules)
        _check_algorithm(source, algorithm, rules)
    check_finite(source, trained.model)
    progress("reading the data", 0, 1)
    sample_batch, call = first_batch(source, trained), call_on_batches(trained.model)
    table, chosen = None, dict[str, Candidate]()
    if budget is not None:
        from stack_quant.nnx_model import untied_for  # imports Flax, which a model with a budget needs

        table = measure_sensitivity(
            untied_for(trained.model, [algorithm]),
            budget.types,
            dict(sample_batch),
            call=call,
            stream=map(dict, trained.training_batches()),
            stream_batches=calibration_batches,
            progress=progress,
        )
        chosen = table.choose(budget)
        rules = table.rules(chosen, algorithm)
    progress("quantizing", 0, 1)

    def quantized_by(rules: tuple[Rule, ...]) -> Any:
        stream = _followed(trained.training_batches(), calibration_batches, progress)
        batch = dict(sample_batch)
        return quantize_model(trained.model, rules, batch, call=call, stream=stream, stream_batches=calibration_batches)

    quantized = None
    if algorithm is None and not isinstance(recipe, Budget) and trained.sections.get(_SECTION) is None:
        rules, quantized = _by_defaults(recipe, rules, quantized_by)
    quantized = quantized_by(rules) if quantized is None else quantized
    section = QuantConfig(rules=rules)
    evaluate = Evaluation(trained, list(islice(trained.validation_batches(), evaluation_batches)))
    before = evaluate(trained.model, None, functools.partial(progress, "loss before"))
    after = evaluate(quantized, section, functools.partial(progress, "loss after"))
    progress("writing", 0, 1)
    trained.save(destination, quantized, {_SECTION: section})
    return QuantizedCheckpoint(destination, report(quantized), before, after, evaluate.targets, table, chosen)


def _check_untrained(source: str, sections: Mapping[str, Any]) -> None:
    if _SECTION in sections:
        raise QuantError(
            f"The model of {source} was trained by rules of its own, which fix the types. Leave the budget out."
        )


def first_batch(source: str, trained: TrainedModel) -> Batch:
    """Returns the first training batch of a model; raises a QuantError if its data are empty."""
    for batch in trained.training_batches():
        return batch
    raise QuantError(f"The data of {source} have no training batch, which calibration needs. Give other data.")


def _by_defaults(
    recipe: Rules | None, rules: tuple[Rule, ...], quantized_by: Callable[[tuple[Rule, ...]], Any]
) -> tuple[tuple[Rule, ...], Any]:
    """Quantizes by the algorithms that a recipe has for models with a stream.

    Returns the rules with the quantized model. For a recipe without such algorithms, and with a warning for a model
    that they cannot quantize, returns `rules` and None.
    """
    chosen = [rule.algorithm for rule in as_rules(recipe, with_stream=True)]
    calibrated = tuple(replace(rule, algorithm=name) for rule, name in zip(rules, chosen, strict=True))
    if calibrated == rules:
        return rules, None
    try:
        return calibrated, quantized_by(calibrated)
    except StackError as error:
        # Nobody requested these algorithms, and some models and data sets do not suit an algorithm.
        names = " and ".join(dict.fromkeys(filter(None, chosen)))
        warnings.warn(
            f"The recipe's {names} cannot quantize this model, and weights are rounded to the nearest, as with "
            f"--algorithm nearest: {error}",
            stacklevel=3,
        )
        return rules, None


def _followed(batches: Iterable[Batch], count: int, progress: Progress) -> Iterator[Batch]:
    for done, batch in enumerate(islice(batches, count)):
        progress("reading the stream", done, count)
        yield dict(batch)


def _check_algorithm(source: str, algorithm: str, rules: tuple[Rule, ...]) -> None:
    if all(rule.algorithm is None for rule in rules):
        raise QuantError(
            f"--algorithm {algorithm}: none of the rules for {source} quantizes weights, so it would not act. "
            "Leave it out, or use a recipe with weights."
        )


def _rules(source: str, trained_by: QuantConfig | None, requested: tuple[Rule, ...] | None) -> tuple[Rule, ...]:
    """Returns the requested rules or, for a model trained by rules, these; the two must not differ."""
    if trained_by is None and requested is not None:
        return requested
    if trained_by is None:
        raise QuantError(
            f"{source} was not trained by a recipe, so a recipe is required: --recipe FILE.yaml, or one of "
            f"{', '.join(recipe_names())}."
        )
    # Types of gradients concern only training, and "ptq" rejects rules with gradients.
    own = tuple(replace(rule, gradients=None) for rule in trained_by.rules)
    if requested is not None and (lines := differences({"rules": to_mapping(requested)}, {"rules": to_mapping(own)})):
        listing = "\n  ".join(lines)
        raise QuantError(
            f"The model of {source} was trained by another recipe. Differences, as requested and as trained:\n  "
            f"{listing}\nLeave --recipe out to quantize by the recipe of the training, or train without a recipe."
        )
    return own


def check_finite(source: str, model: Any) -> None:
    """Raises a QuantError that names each parameter with NaN or infinite entries."""
    from flax import nnx  # an optional dependency, installed if there is an nnx.Module

    flat = nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(model)))
    named = {"/".join(map(str, keys)): array for keys, array in flat.items()}
    floating = {path: array for path, array in named.items() if jnp.issubdtype(array.dtype, jnp.inexact)}
    counts = jax.device_get(_count_not_finite(floating))
    lines = [f"  {path}: {count} of {named[path].size}" for path, count in counts.items() if count]
    if lines:
        listing = "\n".join(lines)
        raise QuantError(
            f"The model of {source} has parameters with NaN or infinite entries:\n{listing}\n"
            "They cannot be quantized. Use an earlier checkpoint, or train the model again from one."
        )


@jax.jit
def _count_not_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.sum(~jnp.isfinite(array)) for path, array in arrays.items()}
