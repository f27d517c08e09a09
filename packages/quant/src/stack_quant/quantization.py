"""Quantization of a function's parameters by rules, and calls of functions on quantized parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.errors import ShapeError, UnknownName, nearest
from stack_core.ops.building import is_quantized
from stack_quant.algorithms import parse_algorithms
from stack_quant.algorithms.stream import run_algorithms
from stack_quant.errors import QuantError, RuleError
from stack_quant.measuring import Call, static_ranges
from stack_quant.methods import Method, method
from stack_quant.packing import stored_bytes
from stack_quant.rotations.fold import fold_rotations
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.transform import coverage
from stack_quant.transform.adapted import Factors
from stack_quant.transform.compiled import Compiled
from stack_quant.transform.coverage import OpRow, ParameterRow, Report
from stack_quant.transform.interpreter import ResolvedRules
from stack_quant.transform.planning import Plan, plan
from stack_quant.transform.program import Parameters, Program, is_array, trace
from stack_quant.transform.sites import site_names
from stack_quant.transformed import TransformedArray

__all__ = ["Quantization", "State", "quantized", "unquantized"]


@dataclass(frozen=True, eq=False)
class Quantization:
    """The plan of a quantized model, by which its programs run.

    Attributes:
      resolved: rules, method and the plan of each parameter.
      report: the coverage report.
    """

    resolved: ResolvedRules
    report: Report
    _compiled: Compiled = field(default_factory=Compiled, init=False, repr=False)

    def call(self, fn: Callable[..., Any], params: Any, state: "State", *args: Any, **kwargs: Any) -> Any:
        """Computes `fn(params, *args, **kwargs)` with the quantized parameters in its products.

        `fn` is traced in float for the shapes of this call, and the trace runs on `params`. Nothing is patched: direct
        calls of `fn` are not affected. A call outside of JAX transformations is compiled once per argument shapes,
        unless an argument is a Python number, on which `fn` may branch.
        """
        return self._run("run", fn, params, state, args, kwargs)

    def assign(
        self, fn: Callable[..., Any], params: Any, state: "State", *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Calls a function that returns a result and new values by path. Returns only values that really changed."""
        return self._run("assign", fn, params, state, args, kwargs)

    def _run(
        self,
        method: str,
        fn: Callable[..., Any],
        params: Any,
        state: "State",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Traces a call and runs the trace by this method of `Program`."""
        parameters, state = Parameters.of(params), state._replace(factors=dict(state.factors))
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_quantized)
        # `jit` distinguishes the shapes of arrays itself, so the key needs only their positions.
        fixed = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        model = tuple(_ARRAY if is_array(leaf) else leaf for leaf in parameters.leaves)

        def run(arrays: Sequence[Any], inputs: Sequence[Any], state: State) -> Any:
            filled, own = iter(inputs), iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(filled) if leaf is _ARRAY else leaf for leaf in fixed])
            now = Parameters(
                tuple(next(own) if leaf is _ARRAY else leaf for leaf in model), parameters.paths, parameters.structure
            )
            program = trace(fn, now, *args, **kwargs)
            held = {"ranges": state.ranges, "key": state.key, "factors": state.factors}
            return getattr(program, method)(now.arrays, self.resolved, **held)

        arrays = list(parameters.arrays.values())  # a list, as JAX would sort a dict by its keys
        inputs = [leaf for leaf in leaves if is_array(leaf)]
        identity = (method, fn, parameters.structure, parameters.paths, model, structure, fixed)
        if _is_traced((arrays, inputs, state)) or not _is_fixed(fixed, identity):
            return run(arrays, inputs, state)
        return self._compiled(identity, run, arrays, inputs, state)

    def quantize(self, path: str, tree: Any) -> Any:
        """Quantizes one parameter, or all parameters under a path, as planned for the model.

        A checkpoint can therefore be quantized while it is read, with one part in memory at a time:
        `quantize_function` and `quantize_model` need only shapes for planning.

        Args:
          path: path of the array or of the subtree, such as "layers/0".
          tree: floating arrays. Arrays that the rules leave in float are returned unchanged.

        Raises:
          UnknownName: the model does not have a parameter at `path`; the message suggests the nearest path.
          ShapeError: the parameter has a different shape in the model.
          ArgumentError: an array contains NaN or infinities.
        """
        part = Parameters.of(tree)
        planned = {row.path: row for row in self.report.parameters}
        arrays = {}
        for below, array in part.arrays.items():
            full = "/".join(filter(None, (path, below)))
            if full not in planned:
                raise UnknownName(f"The model has no parameter {full!r}.{nearest(full, planned)}")
            if planned[full].shape != array.shape:
                raise ShapeError(
                    f"{full}: an array of shape {list(array.shape)}, but the model was planned with "
                    f"{list(planned[full].shape)}. Pass an array of that shape, or plan with the shapes of the arrays."
                )
            spec = self.resolved.specs.get(full)
            number = self.resolved.of_path.get(full)
            if spec is not None and number is not None and self.resolved.rules[number].algorithm is not None:
                raise QuantError(
                    f"{full}: rule {number} has an algorithm, which needs the whole model. Quantize the model by "
                    "quantize_model or quantize_function with its arrays, or leave `algorithm` out."
                )
            arrays[below] = array if spec is None else _parameter(self.resolved.method, array, spec, full)
        return part.with_arrays(arrays)


_ARRAY: Final = object()
"""Placeholder for an array in the cache key of a call."""


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _is_fixed(fixed: Sequence[Any], identity: Any) -> bool:
    """Returns True if a call is worth caching: its key is hashable and free of Python numbers, which tend to vary."""
    if any(isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in fixed):
        return False
    try:
        hash(identity)
    except TypeError:
        return False
    return True


class State(NamedTuple):
    """Arrays of a quantized model in addition to its parameters.

    Attributes:
      ranges: static ranges of activations, by site.
      key: PRNG key of the stochastic rounding of gradients; None rounds to the nearest.
      factors: factors of the adapters, by the path of the parameter.
    """

    ranges: Mapping[str, Range]
    key: jax.Array | None = None
    factors: Mapping[str, Factors] = MappingProxyType({})


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
      name: name of the method.
      stream: calls over which static ranges are measured.
      may_quantize: predicate on paths that is False for arrays that are not parameters.

    Returns:
      All arrays by path, the static ranges by site, and the plan by which programs run.
    """
    chosen = method(name)
    chosen.check(rules)
    _check_algorithms(rules, chosen)
    given = parameters.arrays
    # New rules apply to floats, also of a model that is quantized already.
    parameters = Parameters.of(parameters.with_arrays({path: _floats(array) for path, array in given.items()}))
    program = trace(fn, parameters, *args, **kwargs)
    parameters = Parameters.of(parameters.with_arrays(_rotated(rules, program, parameters.arrays, may_quantize)))
    before = parameters.arrays
    seen = program.survey(before, ResolvedRules(tuple(rules), chosen))
    shapes = {
        path: array.shape
        for path, array in before.items()
        if may_quantize(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    uses = [use for use in seen.uses if use.path in shapes]
    planned = plan(rules, shapes, uses, [row.op for row in seen.rows], seen.stops)
    after = {path: _parameter(chosen, before[path], spec, path) for path, spec in planned.specs.items()}
    after |= {path: inputs.plain(after[path]) for path, inputs in planned.inputs.items()}
    after = {path: after.get(path, array) for path, array in before.items()}
    resolved = ResolvedRules(tuple(rules), chosen, planned.of_path, planned.specs, planned.tiles)
    listed = [_row(path, given[path], after[path], planned) for path in shapes]
    seen = program.survey(after, resolved)
    _check_trained(resolved, seen.rows)
    # The second survey ran with quantized parameters: it gives the report's rows and the sites of activations.
    names = site_names(seen.sites)
    sites = {names[key]: site for key, site in seen.sites.items()}
    has_algorithms = any(rule.algorithm is not None for rule in rules)
    # Both steps read the stream, which may be an iterator.
    calls = list(stream) if has_algorithms and stream is not None else stream
    ranges = static_ranges(fn, parameters, resolved, sites, calls)
    if has_algorithms:
        after |= run_algorithms(fn, parameters, after, resolved, planned.inputs, uses, calls)
    return after, ranges, Quantization(resolved, coverage.report(name, rules, listed, seen.rows))


def _rotated(
    rules: Sequence[Rule], program: Program, arrays: Mapping[str, Any], may_quantize: Callable[[str], bool]
) -> Mapping[str, Any]:
    """Returns the parameters, rotated if an algorithm of the rules folds rotations into the model."""
    steps = [step for rule in rules for step in parse_algorithms(rule.algorithm or "nearest")]
    folds = [dict(options) for step, options in steps if step.folds]
    if not folds:
        return arrays
    if any(options != folds[0] for options in folds):
        raise RuleError("Rules rotate the model by different options, but it has one basis. Use the same in all rules.")
    stream, heads = (bool(folds[0][name]) for name in ("stream", "heads"))
    return {**arrays, **fold_rotations(program, arrays, stream=stream, heads=heads, may_rotate=may_quantize)}


def _check_algorithms(rules: Sequence[Rule], chosen: Method) -> None:
    for number, rule in enumerate(rules):
        if rule.algorithm is not None and not chosen.keeps_ranges:
            raise RuleError(
                f"Rule {number}, {rule}: method {chosen.name!r} rounds weights again at each call, where an algorithm "
                "cannot act. Leave `algorithm` out, or quantize the trained model by method 'ptq'."
            )


def _check_trained(resolved: ResolvedRules, rows: Sequence[OpRow]) -> None:
    """Raises an error if a rule applies only to products that the method cannot train."""
    # Other methods dequantize an operand where no quantized product exists, which still follows the rule.
    if resolved.method.products is None:
        return
    for number, rule in enumerate(resolved.rules):
        mine = [row for row in rows if row.rule == number]
        if rule.optional or not mine or (rule.weights, rule.activations) == (None, None):
            continue
        if all(row.computed == "float" for row in mine):
            reasons = "; ".join(dict.fromkeys(f"{row.op}: {row.reason}" for row in mine))
            raise RuleError(
                f"Rule {number}, {rule}: method {resolved.method.name!r} quantizes none of the operations that the "
                f"rule matches. {reasons}. Use method 'qat', change the rule, or mark it optional=True."
            )


def unquantized() -> Quantization:
    """Returns the plan of a model without rules, which runs in float."""
    return Quantization(ResolvedRules((), method("ptq")), coverage.report("ptq", (), (), ()))


def _floats(array: Any) -> Any:
    """Dequantizes a parameter that is already quantized, as new rules apply to floats; returns others unchanged."""
    if not is_quantized(array):
        return array
    if isinstance(jax.tree.leaves(array)[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    return ops.dequantize(array, array.dtype)


def _parameter(chosen: Method, array: Any, spec: ArraySpec, path: str) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda array: chosen.parameter(array, spec, path), array)
    return chosen.parameter(jnp.asarray(array), spec, path)


def _row(path: str, before: Any, after: Any, planned: Plan) -> ParameterRow:
    number = planned.of_path.get(path)
    size = sum(map(stored_bytes, jax.tree.leaves(before)))
    if not is_quantized(after):
        if path in planned.specs:
            scheme = f"{before.dtype} as {planned.specs[path].type}"
            return ParameterRow(path, number, before.shape, scheme, None, size, size, note=planned.note(path))
        reason = "no rule matches it" if number is None else planned.left[path]
        return ParameterRow(path, number, before.shape, str(before.dtype), None, size, size, reason)
    stored = sum(map(stored_bytes, jax.tree.leaves(after)))
    scales = (after.base if isinstance(after, TransformedArray) else after).scale
    return ParameterRow(path, number, before.shape, after.scheme, scales.shape, size, stored, note=planned.note(path))
