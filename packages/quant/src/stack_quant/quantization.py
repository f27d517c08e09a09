"""From a function of parameters and rules to quantized parameters, and programs that run on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stack_core.ops.building import is_quantized
from stack_quant.errors import QuantError
from stack_quant.measuring import Call, static_ranges
from stack_quant.methods import Method, method
from stack_quant.packing import stored_bytes
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.transform import coverage
from stack_quant.transform.coverage import ParameterRow, Report
from stack_quant.transform.interpreter import Treatment
from stack_quant.transform.planning import Plan, plan
from stack_quant.transform.program import Parameters, trace

__all__ = ["Quantization", "State", "quantized"]


@dataclass(frozen=True, eq=False)
class Quantization:
    """What a quantized model remembers: how its programs are to be run, and what was done."""

    treatment: Treatment
    report: Report

    def call(self, fn: Callable[..., Any], params: Any, state: "State", *args: Any, **kwargs: Any) -> Any:
        """`fn(params, *args, **kwargs)` with the quantized parameters in its products.

        `fn` is traced in float for the shapes of this call, and what was traced is run on `params`. Nothing else is
        traced, patched or kept, so that calls of `fn` itself are not concerned; compile the caller with `jax.jit`.
        """
        parameters = Parameters.of(params)
        return trace(fn, parameters, *args, **kwargs).run(
            parameters.arrays, self.treatment, ranges=state.ranges, key=state.key
        )


class State(NamedTuple):
    """What a quantized model holds beside its parameters.

    Attributes:
      ranges: the static ranges of activations, by site.
      key: what its gradients are rounded at random with, by methods that do so; None rounds them to the nearest.
    """

    ranges: Mapping[str, Range]
    key: jax.Array | None = None


def quantized(
    fn: Callable[..., Any],
    parameters: Parameters,
    rules: Sequence[Rule],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    stream: Iterable[Call] | None,
    may_quantize: Callable[[str], bool] = lambda path: True,
) -> tuple[dict[str, Any], dict[str, Range], Quantization]:
    """Quantizes the parameters of `fn(params, *args, **kwargs)`.

    Args:
      name: of the method.
      stream: calls over which static ranges are measured.
      may_quantize: whether the array at a path is a parameter at all.

    Returns:
      All arrays by path, the static ranges by site, and how to run programs with them.
    """
    chosen = method(name)
    chosen.check(rules)
    program = trace(fn, parameters, *args, **kwargs)
    before = parameters.arrays
    _check_plain(before)
    seen = program.survey(before, Treatment(tuple(rules), chosen))
    shapes = {
        path: array.shape
        for path, array in before.items()
        if may_quantize(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    planned = plan(rules, shapes, [use for use in seen.uses if use.path in shapes], [row.op for row in seen.rows])
    after = {path: _parameter(chosen, before[path], spec, path) for path, spec in planned.specs.items()}
    after = {path: after.get(path, array) for path, array in before.items()}
    treatment = Treatment(tuple(rules), chosen, planned.of_path, planned.specs)
    listed = [_row(path, before[path], after[path], planned) for path in shapes]
    seen = program.survey(after, treatment)
    ranges = static_ranges(fn, parameters, treatment, seen.sites, stream)
    return after, ranges, Quantization(treatment, coverage.report(name, rules, listed, seen.rows))


def _check_plain(arrays: Mapping[str, Any]) -> None:
    quantized = [path for path, array in arrays.items() if is_quantized(array)]
    if quantized:
        raise QuantError(f"{quantized[0]} is quantized already. Quantize the model that it came from.")


def _parameter(chosen: Method, array: Any, spec: ArraySpec, path: str) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda array: chosen.parameter(array, spec, path), array)
    return chosen.parameter(jnp.asarray(array), spec, path)


def _row(path: str, before: Any, after: Any, planned: Plan) -> ParameterRow:
    number = planned.of_path.get(path)
    size = stored_bytes(before)
    if not is_quantized(after):
        if path in planned.specs:
            scheme = f"{before.dtype} as {planned.specs[path].type}"
            return ParameterRow(path, number, before.shape, scheme, None, size, size)
        reason = "no rule matches it" if number is None else planned.left[path]
        return ParameterRow(path, number, before.shape, str(before.dtype), None, size, size, reason)
    stored = sum(map(stored_bytes, jax.tree.leaves(after)))
    return ParameterRow(path, number, before.shape, after.scheme, after.scale.shape, size, stored)
