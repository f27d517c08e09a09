"""The sensitivity of a model's outputs to the type of each parameter.

A site is a parameter that a rule can quantize. Layers that a scan stacks are one site, because their codes are one
array; a tied table is one site with all of its uses. Only one site at a time differs from the float model, as in ZeroQ
(Cai et al., ZeroQ: A Novel Zero Shot Quantization Framework, 2020, arXiv:2001.00281, section 3.2). Departures: the
inputs are a calibration stream instead of synthetic data, and outputs other than logits have a squared error.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.errors import StackError
from stack_quant.conversion import quantize_array
from stack_quant.errors import QuantError
from stack_quant.measuring import Call, call_arguments
from stack_quant.methods import method
from stack_quant.mixed.allocation import allocate
from stack_quant.mixed.types import FLOAT, Budget, type_fields
from stack_quant.packing import stored_bytes
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec
from stack_quant.transform.coverage import aligned
from stack_quant.transform.interpreter import ResolvedRules
from stack_quant.transform.planning import plan
from stack_quant.transform.program import Parameters, is_array, trace

__all__ = ["Candidate", "Sensitivity", "measure_sensitivity"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A type for a site.

    Attributes:
      type: name of the type, as in `stack_quant.mixed.types`.
      bytes: memory of the site in this type.
      error: error of the model's outputs if only this site has the type.
    """

    type: str
    bytes: int
    error: float


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity table of a model; `str(table)` is the table.

    Attributes:
      sites: candidates of each site, by path.
      other_bytes: memory by path of the parameters that stay in float.
      entries: number of parameters of the model.
      float_bytes: memory of all parameters in float.
      unit: unit of the errors.
      looked_up: paths of sites without a product.
    """

    sites: Mapping[str, Sequence[Candidate]]
    other_bytes: Mapping[str, int]
    entries: int
    float_bytes: int
    unit: str
    looked_up: frozenset[str] = frozenset()

    def choose(self, budget: Budget) -> dict[str, Candidate]:
        """Chooses a candidate per site: the smallest sum of errors within the budget (`allocation.allocate`).

        Raises:
          QuantError: the budget is below the smallest types of all sites.
        """
        limit, other = budget.bytes(self.entries), sum(self.other_bytes.values())
        smallest = other + sum(min(one.bytes for one in row) for row in self.sites.values())
        if limit < smallest:
            names = ", ".join(dict.fromkeys(min(row, key=lambda one: one.bytes).type for row in self.sites.values()))
            raise QuantError(
                f"budget={budget.text!r} allows {limit:,} bytes, but the model needs {smallest:,} "
                f"({8 * smallest / self.entries:.2f} bits per parameter) with every site in its smallest type ({names})"
                f"{f' and {other:,} bytes of other parameters in float' if other else ''}. Raise the budget to "
                f"{math.ceil(800 * smallest / self.entries) / 100:g}bits, or offer smaller types."
            )
        rows = [list(row) for row in self.sites.values()]
        # Sites may lack a type, and uniform solutions need the same candidates in the same places.
        names = list(dict.fromkeys(one.type for row in rows for one in row))
        of_name = [{one.type: one for one in row} for row in rows]
        sizes = [[row[name].bytes if name in row else 0 for name in names] for row in of_name]
        errors = [[row[name].error if name in row else math.inf for name in names] for row in of_name]
        places = allocate(sizes, errors, limit - other)
        return {path: row[names[place]] for path, row, place in zip(self.sites, of_name, places, strict=True)}

    def uniform(self, name: str) -> dict[str, Candidate] | None:
        """Returns the candidate of this type for all sites, or None if it is missing for a site."""
        found = {path: next((one for one in row if one.type == name), None) for path, row in self.sites.items()}
        return {path: one for path, one in found.items() if one} if all(found.values()) else None

    def total_bytes(self, chosen: Mapping[str, Candidate]) -> int:
        """Returns the memory of all parameters with these candidates."""
        return sum(self.other_bytes.values()) + sum(one.bytes for one in chosen.values())

    def rules(self, chosen: Mapping[str, Candidate], algorithm: str | None = None) -> tuple[Rule, ...]:
        """Returns one rule per site, which matches this site only.

        A path matches consecutive segments of a longer path, so the longest paths come first.

        Args:
          algorithm: algorithm of the sites with products, as in `Rule`.
        """
        fields = type_fields(sorted({one.type for one in chosen.values()}))
        rules = {
            path: Rule(
                path=_exactly(path),
                algorithm=None if one.type == FLOAT or path in self.looked_up else algorithm,
                **fields[one.type],
            )
            for path, one in chosen.items()
        }
        caught = [path for path in self.other_bytes if any(rule.matches_path(path) for rule in rules.values())]
        rules |= {path: Rule(path=_exactly(path)) for path in caught}
        return tuple(rules[path] for path in sorted(rules, key=lambda path: -path.count("/")))

    def rows(self, chosen: Mapping[str, Candidate] | None = None) -> list[dict[str, Any]]:
        """Returns one mapping per site and type."""
        return [
            {"path": path, **dataclasses.asdict(one), "chosen": chosen is not None and chosen[path] == one}
            for path, row in self.sites.items()
            for one in row
        ]

    def table(self, chosen: Mapping[str, Candidate] | None = None) -> str:
        """Formats the errors of each site by type; * marks the chosen types."""
        names = list(dict.fromkeys(one.type for row in self.sites.values() for one in row))
        cells = [("site", "bytes", *names)]
        for path, row in self.sites.items():
            of_name = {one.type: one for one in row}
            marked = None if chosen is None else chosen[path]
            errors = (
                "-" if one is None else f"{one.error:.2e}{'*' if one == marked else ''}"
                for one in map(of_name.get, names)
            )
            size = max(one.bytes for one in row) if marked is None else marked.bytes
            cells.append((path, f"{size:,}", *errors))
        heading = f"error of the outputs if only one site has a type, in {self.unit}"
        return "\n".join([heading, *aligned(cells, [""] * len(cells))])

    def __str__(self) -> str:
        return self.table()


def measure_sensitivity(
    model: Any,
    types: Sequence[str],
    sample_batch: Any,
    *,
    call: Callable[..., Any] | None = None,
    stream: Iterable[Any] | None,
    stream_batches: int,
    progress: Progress = lambda stage, finished, total: None,
) -> Sensitivity:
    """Measures the sensitivity of a model's outputs, in one pass over a calibration stream.

    For the logits of a language model the error is the mean KL divergence from the float model,

        error = mean_tokens sum_v p_v (log p_v - log q_v),

    in nats per token. For other outputs y it is ||y' - y||^2 / ||y||^2. A batch is computed once for the float model
    and once per site and type; the outputs of a single batch are in memory.

    Args:
      model: an `nnx.Module` or a callable pytree, in float.
      types: names of `stack_quant.mixed.types`, such as "int4/t32" or "float".
      sample_batch, call: arguments of one call, and the call, as for `quantize_model`.
      stream: batches in the form of `sample_batch`.
      stream_batches: maximum number of batches taken from the stream.
      progress: callback with a stage, its completed steps and its total steps.

    Raises:
      QuantError: batches are missing, no parameter can be quantized, or outputs contain NaN or infinities.
      StackError: a type does not exist.
    """
    fields = type_fields(types)
    fn, parameters, may_quantize, is_logits, arguments_of = _as_function(model, sample_batch, call)
    args, kwargs = arguments_of(sample_batch)
    arrays = parameters.arrays
    floating = {
        path: array
        for path, array in arrays.items()
        if may_quantize(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    specs, looked_up = _specs(trace(fn, parameters, *args, **kwargs), arrays, floating, fields)
    if not any(specs.values()):
        raise QuantError(
            f"None of the {len(floating)} parameters can be quantized to {', '.join(types)}. Offer other types."
        )
    sites = {path: found for path, found in specs.items() if found}
    distance = _Distance(fn, parameters, is_logits)
    # Types with the same tiles on a short axis are the same specification, which is measured once.
    totals: dict[tuple[str, ArraySpec | None], np.ndarray] = {
        (path, spec): np.zeros(2) for path, found in sites.items() for spec in found.values()
    }
    count = 0
    for batch in islice(stream or (), stream_batches):
        inputs = arguments_of(batch)
        reference = distance.reference(inputs, count)
        for done, (path, spec) in enumerate(totals):
            progress("measuring the sensitivity", count * len(totals) + done, stream_batches * len(totals))
            if spec is None:
                continue
            changed = ops.dequantize(quantize_array(arrays[path], spec, name=path), arrays[path].dtype)
            found = distance(inputs, {**arrays, path: changed}, reference)
            if not np.isfinite(found).all():
                raise QuantError(
                    f"With {path} in {spec.type}, the outputs hold NaN or infinities for batch {count} of the "
                    "calibration stream. Offer types of more bits, or correct the model."
                )
            totals[path, spec] += found
        count += 1
    if not count:
        raise QuantError(
            "A sensitivity table needs batches for calibration, but there are none. Give data, and at least one "
            "calibration batch."
        )
    return Sensitivity(
        {
            path: [
                Candidate(name, _bytes(arrays[path], spec), _mean(totals[path, spec])) for name, spec in found.items()
            ]
            for path, found in sites.items()
        },
        {path: stored_bytes(array) for path, array in floating.items() if path not in sites},
        sum(int(array.size) for array in floating.values()),
        sum(map(stored_bytes, floating.values())),
        "nats per token" if is_logits else "||y' - y||^2 / ||y||^2",
        frozenset(looked_up & sites.keys()),
    )


def _mean(total: np.ndarray) -> float:
    return float(total[0] / total[1]) if total[1] else 0.0


def _as_function(
    model: Any, sample_batch: Any, call: Callable[..., Any] | None
) -> tuple[Any, Parameters, Callable[[str], bool], bool, Any]:
    """Returns a model as a function of parameters.

    Returns:
      The function, its parameters, a predicate on the paths of parameters, whether it returns logits, and a function
      from a batch to positional and keyword arguments.
    """
    from stack_quant.model import QuantizedModel, call_model, is_nnx_module, split_arguments

    args, kwargs = split_arguments(sample_batch)
    if is_nnx_module(model):
        from flax import nnx  # an optional dependency, installed if there is an nnx.Module

        from stack_core.abi.models import LanguageModel
        from stack_quant.nnx_model import ModuleProgram, plain_module

        program = ModuleProgram.of(plain_module(model), args, kwargs, call)

        def arguments_of(batch: Any) -> Call:
            args, kwargs = split_arguments(batch)
            return args, program.taken(kwargs)

        is_parameter = lambda path: issubclass(program.kinds[path], nnx.Param)
        return program.fn, program.parameters, is_parameter, isinstance(model, LanguageModel), arguments_of
    plain: Any = model.params if isinstance(model, QuantizedModel) else model
    parameters = Parameters.of(plain)
    if not callable(plain) or not parameters.arrays:
        raise QuantError(f"{type(plain).__name__} is neither an nnx.Module nor a callable pytree with parameters.")
    return call or call_model, parameters, lambda path: True, False, split_arguments


def _specs(
    program: Any, arrays: Mapping[str, Any], floating: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, ArraySpec | None]], frozenset[str]]:
    """Returns the specification of each parameter by path and type (None: float), and the paths without a product.

    Types whose tiles do not fit a parameter are omitted; a parameter without types other than float has none.
    """
    every = Rule(path=".*", weights="int8")
    survey = program.survey(arrays, ResolvedRules((every,), method("ptq")))
    names = [row.op for row in survey.rows]
    found: dict[str, dict[str, ArraySpec | None]] = {}
    for path, array in floating.items():
        uses = [use for use in survey.uses if use.path == path]
        found[path] = {}
        for name, settings in fields.items():
            rule = Rule(path=_exactly(path), optional=True, **settings)
            try:
                planned = plan([rule], {path: array.shape}, uses, names, survey.stops)
            except StackError:
                continue  # The tiles of the type do not divide the axes of this parameter.
            if path in planned.specs or name == FLOAT:
                found[path][name] = planned.specs.get(path)
        if not any(spec is not None for spec in found[path].values()):
            found[path] = {}
    multiplied = {use.path for use in survey.uses if not use.is_lookup}
    return found, frozenset(floating.keys() - multiplied)


def _bytes(array: Any, spec: ArraySpec | None) -> int:
    if spec is None:
        return stored_bytes(array)
    quantized = jax.eval_shape(
        functools.partial(quantize_array, spec=spec), jax.ShapeDtypeStruct(array.shape, array.dtype)
    )
    return sum(map(stored_bytes, jax.tree.leaves(quantized)))


def _exactly(path: str) -> str:
    """Returns a pattern that matches this path; as usual, longer paths that contain this one match too."""
    return "/".join(re.escape(part) for part in path.split("/"))


class _Distance:
    """The error of a model's outputs on a batch, for other parameters, as [sum, number of terms or ||y||^2].

    Args:
      fn: function of the parameters and of the arguments of a call.
      parameters: floating parameters.
      is_logits: whether the function returns the logits of a language model.
    """

    def __init__(self, fn: Callable[..., Any], parameters: Parameters, is_logits: bool) -> None:
        self._fn, self._parameters, self._is_logits = fn, parameters, is_logits
        # A list instead of a dict, because arguments that are not arrays may be unhashable.
        self._compiled: list[tuple[Any, tuple[Any, Any]]] = []

    def reference(self, call: Call, number: int) -> Any:
        """Returns the outputs of the float model.

        Raises:
          QuantError: they contain NaN or infinities.
        """
        arguments, (outputs, _) = self._programs(call)
        found = outputs(self._parameters.arrays, arguments)
        if not all(bool(jnp.isfinite(array).all()) for array in found):
            raise QuantError(
                f"The model's outputs hold NaN or infinities for batch {number} of the calibration stream. Correct the "
                "model or the data."
            )
        return found

    def __call__(self, call: Call, arrays: Mapping[str, Any], reference: Any) -> np.ndarray:
        arguments, (_, compare) = self._programs(call)
        return np.asarray(compare(dict(arrays), arguments, reference), np.float64)

    def _programs(self, call: Call) -> tuple[list[Any], tuple[Any, Any]]:
        arguments, signature = call_arguments(*call)
        for known, programs in self._compiled:
            if known == signature:
                return arguments, programs
        leaves, structure = jax.tree.flatten(call)

        def outputs(arrays: Mapping[str, Any], arguments: Sequence[Any]) -> list[Any]:
            given = iter(arguments)
            args, kwargs = jax.tree.unflatten(structure, [next(given) if is_array(leaf) else leaf for leaf in leaves])
            found = jax.tree.leaves(self._fn(self._parameters.with_arrays(arrays), *args, **kwargs))
            found = [array.astype(jnp.float32) for array in found if jnp.issubdtype(array.dtype, jnp.floating)]
            return [jax.nn.log_softmax(found[0])] if self._is_logits else found

        def compare(arrays: Mapping[str, Any], arguments: Sequence[Any], reference: Sequence[Any]) -> jax.Array:
            found = outputs(arrays, arguments)
            if self._is_logits:
                divergence = jnp.sum(jnp.exp(reference[0]) * (reference[0] - found[0]))
                return jnp.stack([divergence, jnp.float32(math.prod(found[0].shape[:-1]))])
            error = sum(jnp.sum(jnp.square(new - old)) for new, old in zip(found, reference, strict=True))
            return jnp.stack([error, sum(jnp.sum(jnp.square(old)) for old in reference)])

        programs = (jax.jit(outputs), jax.jit(compare))
        self._compiled.append((signature, programs))
        return arguments, programs
