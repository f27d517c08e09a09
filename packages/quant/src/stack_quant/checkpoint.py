"""Trained models of any registered model format, quantized and measured."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.config import differences, to_mapping
from stack_core.abi.errors import ConversionError
from stack_core.abi.metrics import combine_all
from stack_core.abi.model_formats import open_model
from stack_quant.calibration import STREAM_BATCHES
from stack_quant.errors import QuantError
from stack_quant.model import quantize_model, report
from stack_quant.recipes import load_recipe, recipe_names
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig, Quantization
from stack_quant.transform.coverage import Report

__all__ = ["QuantizedCheckpoint", "quantize_checkpoint"]

_SECTION = "quant"

Batch = Mapping[str, Any]
Progress = Callable[[str, int, int], None]


def _untold(stage: str, done: int, total: int) -> None:
    """A `Progress` that nobody follows."""


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """What was made.

    Attributes:
      loss_before, loss_after: means over the same held-out targets; None where there are none.
      targets: how many these are.
    """

    destination: Path
    report: Report
    loss_before: float | None
    loss_after: float | None
    targets: int


def quantize_checkpoint(
    source: str,
    recipe: str | None,
    destination: Path,
    *,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int = 32,
    progress: Progress = _untold,
) -> QuantizedCheckpoint:
    """Quantizes the model in a directory and writes a run directory.

    Args:
      source: "DIR" or "FORMAT:DIR".
      recipe: a name of `stack_quant.recipes`, or the path of a YAML file; None for that which the model was trained by.
      data: address of the documents to calibrate and to measure on; None for the model's own.
      calibration_batches: of the training data, over which the recipe's static ranges are measured.
      evaluation_batches: of held-out data, at most.
      progress: receives what is done now, and how many of how many parts of it are.

    Raises:
      ConversionError: no format knows the directory, or `destination` exists.
      QuantError: parameters hold NaN or infinities; names each.
      StackError: the recipe, the checkpoint or the data cannot be used.
    """
    if destination.exists():
        raise ConversionError(f"{destination} exists already; nothing is overwritten. Choose a new directory.")
    given = None if recipe is None else load_recipe(recipe)
    progress("reading the model", 0, 1)
    trained = open_model(source, data=data)
    section = QuantConfig(rules=_rules(source, trained.sections.get(_SECTION), given))
    _check_finite(source, trained.model)
    progress("reading the data", 0, 1)
    sample_batch = next(iter(trained.training_batches()))
    progress("quantizing", 0, 1)
    stream = _followed(trained.training_batches(), calibration_batches, progress)
    quantized = quantize_model(
        trained.model, section.rules, dict(sample_batch), stream=stream, stream_batches=calibration_batches
    )
    batches = list(islice(trained.validation_batches(), evaluation_batches))
    before, targets = _mean_loss(trained.metrics, trained.model, batches, functools.partial(progress, "loss before"))
    quantized_metrics = functools.partial(Quantization(section, sample_batch).call, trained.metrics)
    after, _ = _mean_loss(quantized_metrics, quantized, batches, functools.partial(progress, "loss after"))
    progress("writing", 0, 1)
    trained.save(destination, quantized, {_SECTION: section})
    return QuantizedCheckpoint(destination, report(quantized), before, after, targets)


def _followed(batches: Iterable[Batch], count: int, progress: Progress) -> Iterator[Batch]:
    for done, batch in enumerate(islice(batches, count)):
        progress("measuring ranges", done, count)
        yield dict(batch)


def _rules(source: str, trained_by: QuantConfig | None, given: tuple[Rule, ...] | None) -> tuple[Rule, ...]:
    """Those that are given, which must be those that the model was trained by, if it was."""
    if trained_by is None and given is not None:
        return given
    if trained_by is None:
        raise QuantError(
            f"{source} was not trained by a recipe, so that one has to be given: --recipe FILE.yaml, or one of "
            f"{', '.join(recipe_names())}."
        )
    own = tuple(replace(rule, gradients=None) for rule in trained_by.rules)
    if given is not None and (lines := differences({"rules": to_mapping(given)}, {"rules": to_mapping(own)})):
        listing = "\n  ".join(lines)
        raise QuantError(
            f"The model of {source} was trained by another recipe; here is the one that is given, not that one:\n  "
            f"{listing}\nLeave --recipe out to quantize by that one, or train without it."
        )
    return own


def _check_finite(source: str, model: Any) -> None:
    from flax import nnx  # here, where there is a module, whose maker has flax; stack-quant itself does without

    flat = nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(model)))
    named = {"/".join(map(str, keys)): array for keys, array in flat.items()}
    lines = [f"  {path}: {count} of {array.size}" for path, array in named.items() if (count := _not_finite(array))]
    if lines:
        listing = "\n".join(lines)
        raise QuantError(
            f"The model of {source} has parameters with entries that are NaN or infinite:\n{listing}\n"
            "No rounding mends them. Take an earlier checkpoint, or train it again from one."
        )


def _not_finite(array: Any) -> int:
    return int(jnp.sum(~jnp.isfinite(array))) if jnp.issubdtype(array.dtype, jnp.inexact) else 0


def _mean_loss(
    metrics: Callable[[Any, Any], Mapping[str, Any]],
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    progress: Callable[[int, int], None],
) -> tuple[float | None, int]:
    """The mean over all targets, and how many they are."""
    from flax import nnx  # as above

    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, batch: metrics(nnx.merge(graph, state), batch))
    found = []
    for done, batch in enumerate(batches):
        progress(done, len(batches))
        found.append(jax.device_get(compiled(state, dict(batch))["loss"]))
    mean = combine_all([{"loss": loss} for loss in found]).get("loss")
    return (float(mean), int(mean.weight)) if mean is not None and mean.weight else (None, 0)
