"""The loss and the bytes of a model in every scheme by every method, as one HTML file."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import jax

from stack_core.abi.errors import ConversionError, StackError
from stack_core.abi.model_formats import open_model
from stack_core.report.document import document, key_values
from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, breakable, element
from stack_core.report.plots import Chart, Series
from stack_core.report.svg import draw
from stack_quant.algorithms import parse_algorithms
from stack_quant.batch_calls import call_on_batches
from stack_quant.calibration import STREAM_BATCHES, check_batches
from stack_quant.checkpoint import check_finite, first_batch
from stack_quant.errors import QuantError
from stack_quant.evaluation import Evaluation
from stack_quant.mixed.sensitivity import Sensitivity, measure_sensitivity
from stack_quant.mixed.types import FLOAT, TYPES, Budget, type_fields
from stack_quant.model import quantize_model, report
from stack_quant.recipes import as_rules, recipe_names
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig

__all__ = ["METHODS", "SCHEMES", "Sweep", "SweepRow", "sweep_checkpoint"]

METHODS: Final = ("nearest", "gptq", "hqq", "awq", "hadamard,least=1+gptq", "smoothquant+hadamard,least=1")
"""Default algorithms of a sweep."""

SCHEMES: Final = (*(name for name in TYPES if name != "float"), "mxfp4", "nvfp4", "mxfp8")
"""Default types of a sweep, for all parameters, in addition to the recipes."""


@dataclass(frozen=True)
class Selection:
    """The schemes and methods of a sweep.

    Attributes:
      recipes: names of recipes, or paths of YAML files.
      types: types for all parameters, as in `stack_quant.mixed.types`.
      mixed: candidate types of mixed schemes.
      methods: algorithms, as in `Rule`.
    """

    recipes: Sequence[str] = recipe_names()
    types: Sequence[str] = SCHEMES
    mixed: Sequence[str] = TYPES
    methods: Sequence[str] = METHODS

    @classmethod
    def of(cls, recipe: str | None, types: Sequence[str] | None, method: str | None) -> "Selection":
        """Restricts the defaults: to one recipe, to some types (and then no recipes by default), to a method."""
        found = cls(methods=METHODS if method is None else (method,))
        if types is not None:
            return replace(found, recipes=() if recipe is None else (recipe,), types=types, mixed=types)
        return found if recipe is None else replace(found, recipes=(recipe,), types=())

    def schemes(self) -> dict[str, tuple[Rule, ...]]:
        """Returns the rules of each recipe and type.

        Raises:
          StackError: a recipe, type or method does not exist.
        """
        for method in self.methods:
            parse_algorithms(method)
        uniform = type_fields(self.types) if self.types else {}
        type_fields(self.mixed)
        return {Path(name).stem: as_rules(name) for name in self.recipes} | {
            f"{name} everywhere": (Rule(path=".*", **settings),) for name, settings in uniform.items() if settings
        }


@dataclass(frozen=True)
class SweepRow:
    """A model in one scheme by one method.

    Attributes:
      scheme: name of a recipe, a type of `stack_quant.mixed.types`, "mixed" with a budget, or "float".
      method: algorithm of the weights.
      parameter_bytes: memory of all parameters.
      loss: mean loss on the held-out stream, in nats per target.
      loss_change_share: change of the loss relative to float.
      quantize_s: time of the quantization in seconds.
      note: reason why the model could not be quantized, or "".
    """

    scheme: str
    method: str
    parameter_bytes: int | None
    loss: float | None
    loss_change_share: float | None
    quantize_s: float | None
    note: str = ""


_COLUMNS: Final = tuple(column.name for column in fields(SweepRow))


@dataclass(frozen=True)
class Sweep:
    """Results of `sweep_checkpoint`.

    Attributes:
      source: address of the model.
      rows: one row for float and one per scheme and method.
      sensitivity: table from which the mixed schemes were chosen.
      stream_tokens, targets: numbers of the tokens of the calibration stream and of the held-out targets.
    """

    source: str
    rows: Sequence[SweepRow]
    sensitivity: Sensitivity
    stream_tokens: int
    targets: int

    def page(self) -> str:
        """Returns the results as a self-contained HTML page: a chart, the results and the sensitivity table."""
        series = list[Series]()
        for method in dict.fromkeys(row.method for row in self.rows):
            found = [row for row in self.rows if row.method == method]
            # A row without a loss lacks bytes, too.
            dots = sorted(
                (float(row.parameter_bytes or 0), row.loss, row.scheme) for row in found if row.loss is not None
            )
            points, labels = [(size, loss) for size, loss, _ in dots], [name for *_, name in dots]
            series.append(Series(method or "float", "dots", points, labels))
        facts = {"calibration tokens": self.stream_tokens, "held-out targets": self.targets}
        names = list(dict.fromkeys(one.type for row in self.sensitivity.sites.values() for one in row))
        errors = [
            (path, *(next((f"{one.error:.2e}" for one in row if one.type == name), "-") for name in names))
            for path, row in self.sensitivity.sites.items()
        ]
        cells = [[_cell(name, getattr(row, name)) for name in _COLUMNS] for row in self.rows]
        return document(
            f"Quantization of {self.source}",
            element("header", element("h1", "Quantization"), element("p", breakable(self.source)), key_values(facts)),
            element(
                "main",
                draw(Chart("Loss over bytes", "parameter_bytes", "loss", series, from_zero=False, size="whole")),
                element("h2", "Schemes and methods"),
                _html_table([title(name) for name in _COLUMNS], cells),
                element("h2", "Sensitivity"),
                element("p", f"Error of the outputs if only one site has a type, in {self.sensitivity.unit}."),
                _html_table(["site", *names], errors),
            ),
        )


def _cell(name: str, value: Any) -> str:
    if value == "" or name != "loss" or value is None:
        return "" if value == "" else number(name, value)
    return f"{value:.4f}"


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element("table", element("thead", head), element("tbody", *body))


def sweep_checkpoint(
    source: str,
    destination: Path,
    selection: Selection = Selection(),
    *,
    data: str | None = None,
    calibration_batches: int = STREAM_BATCHES,
    evaluation_batches: int = 32,
    progress: Callable[[str, int, int], None] = lambda stage, finished, total: None,
) -> Sweep:
    """Quantizes a model by every scheme and method, measures each on a held-out stream, and writes an HTML file.

    The schemes are recipes, types for all parameters, and, for the bytes of each of these types, the mixed scheme
    that `Sensitivity.choose` finds. A combination that cannot quantize the model becomes a row with the reason.

    Args:
      source: "DIR" or "FORMAT:DIR".
      destination: file to write, which must not exist.
      selection: schemes and methods to measure.
      data, calibration_batches, evaluation_batches: as for `quantize_checkpoint`.
      progress: callback with the name of the current stage, its completed steps and its total steps.

    Raises:
      ConversionError: `destination` exists, or no format recognizes the source.
      QuantError: held-out data or training batches are missing, or parameters contain NaN or infinities.
      StackError: a recipe, type or algorithm does not exist.
    """
    check_batches(calibration_batches=calibration_batches, evaluation_batches=evaluation_batches)
    if destination.exists():
        raise ConversionError(f"{destination} exists already and is not overwritten. Choose a new file.")
    schemes = selection.schemes()
    progress("reading the model", 0, 1)
    trained = open_model(source, data=data)
    check_finite(source, trained.model)
    sample_batch = dict(first_batch(source, trained))
    stream = [dict(batch) for batch in islice(trained.training_batches(), calibration_batches)]
    evaluate = Evaluation(trained, list(islice(trained.validation_batches(), evaluation_batches)))
    plain = evaluate(trained.model)
    if plain is None:
        raise QuantError(f"A sweep measures the loss on held-out data, and {source} has none. Give other data.")
    table = measure_sensitivity(
        trained.model,
        selection.mixed,
        sample_batch,
        call=call_on_batches(trained.model),
        stream=stream,
        stream_batches=len(stream),
        progress=progress,
    )
    schemes |= _mixed(table)
    rows = [SweepRow("float", "", table.float_bytes, plain, 0.0, None)]
    plan = [(name, rules, method) for name, rules in schemes.items() for method in selection.methods]
    for done, (name, rules, method) in enumerate(plan):
        progress(f"{name}, {method}", done, len(plan))
        rows.append(_row(trained.model, name, rules, method, stream, evaluate, plain))
    sizes = [array.size for batch in stream for name, array in batch.items() if name == "tokens"]
    result = Sweep(source, rows, table, sum(sizes), evaluate.targets)
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(result.page(), encoding="utf-8")
    return result


def _mixed(table: Sensitivity) -> dict[str, tuple[Rule, ...]]:
    """Returns the mixed schemes for the bytes of each uniform one."""
    found: dict[str, tuple[Rule, ...]] = {}
    for name in dict.fromkeys(one.type for row in table.sites.values() for one in row):
        uniform = table.uniform(name)
        if uniform is None or name == FLOAT:
            continue
        size = table.total_bytes(uniform)
        chosen = table.choose(Budget(f"{size}B"))
        found[f"mixed, {8 * size / table.entries:.2f} bits"] = table.rules(chosen)
    return found


def _row(
    model: Any,
    scheme: str,
    rules: tuple[Rule, ...],
    method: str,
    stream: Sequence[Any],
    evaluate: Evaluation,
    plain: float,
) -> SweepRow:
    section = QuantConfig(rules=tuple(_with_method(rule, method) for rule in rules))
    options: Any = {"call": call_on_batches(model), "stream": stream, "stream_batches": len(stream)}
    start = time.perf_counter()
    try:
        quantized = quantize_model(model, section.rules, stream[0], **options)
        jax.block_until_ready(jax.tree.leaves(quantized))
        quantize_s = time.perf_counter() - start
        loss = evaluate.of_quantized(quantized, section)
    except StackError as error:
        return SweepRow(scheme, method, None, None, None, None, str(error))
    change = None if loss is None else loss / plain - 1
    return SweepRow(scheme, method, report(quantized).bytes_after, loss, change, quantize_s)


def _with_method(rule: Rule, method: str) -> Rule:
    # The rules of a mixed scheme leave the algorithm out for tables without a product.
    return replace(rule, algorithm=None if rule.weights is None or method == "nearest" else method)
