"""From a function of parameters and rules to quantized parameters, and programs that run on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.errors import ShapeError, UnknownName, nearest
from stack_core.ops.building import is_quantized
from stack_quant.errors import RuleError
from stack_quant.measuring import Call, static_ranges
from stack_quant.methods import Method, method
from stack_quant.packing import stored_bytes
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.transform import coverage
from stack_quant.transform.adapted import Factors
from stack_quant.transform.compiled import Compiled
from stack_quant.transform.coverage import OpRow, ParameterRow, Report
from stack_quant.transform.interpreter import Treatment
from stack_quant.transform.planning import Plan, plan
from stack_quant.transform.program import Parameters, is_array, trace
from stack_quant.transform.sites import site_names

__all__ = ["Quantization", "State", "quantized", "unquantized"]


@dataclass(frozen=True, eq=False)
class Quantization:
    """What a quantized model remembers: how its programs are to be run, and what was done."""

    treatment: Treatment
    report: Report
    _compiled: Compiled = field(default_factory=Compiled, init=False, repr=False)

    def call(self, fn: Callable[..., Any], params: Any, state: "State", *args: Any, **kwargs: Any) -> Any:
        """`fn(params, *args, **kwargs)` with the quantized parameters in its products.

        `fn` is traced in float for the shapes of this call, and what was traced is run on `params`. Nothing is patched,
        so that calls of `fn` itself are not concerned. A call outside of JAX's transformations compiles this once for
        the shapes of its arguments, unless there are numbers of Python among them, on which `fn` may branch.
        """
        return self._run("run", fn, params, state, args, kwargs)

    def assign(
        self, fn: Callable[..., Any], params: Any, state: "State", *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """As `call`, of a function that returns a result and new values by path; also those that are really new."""
        return self._run("assign", fn, params, state, args, kwargs)

    def _run(
        self,
        how: str,
        fn: Callable[..., Any],
        params: Any,
        state: "State",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Traces a call and runs it by a method of `Program`."""
        parameters, state = Parameters.of(params), state._replace(factors=dict(state.factors))
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_quantized)
        fixed = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        model = tuple(_ARRAY if is_array(leaf) else leaf for leaf in parameters.leaves)

        def run(arrays: Sequence[Any], given: Sequence[Any], state: State) -> Any:
            filled, own = iter(given), iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(filled) if leaf is _ARRAY else leaf for leaf in fixed])
            now = Parameters(
                tuple(next(own) if leaf is _ARRAY else leaf for leaf in model), parameters.paths, parameters.structure
            )
            program = trace(fn, now, *args, **kwargs)
            held = {"ranges": state.ranges, "key": state.key, "factors": state.factors}
            return getattr(program, how)(now.arrays, self.treatment, **held)

        arrays = list(parameters.arrays.values())  # in their order, which that of their names is not
        given = [leaf for leaf in leaves if is_array(leaf)]
        identity = (how, fn, parameters.structure, parameters.paths, model, structure, fixed)
        if _is_traced((arrays, given, state)) or not _is_fixed(fixed, identity):
            return run(arrays, given, state)
        return self._compiled(identity, run, arrays, given, state)

    def quantize(self, path: str, tree: Any) -> Any:
        """One parameter, or all those under a path, as the whole was planned.

        So a checkpoint is quantized as it is read, one part in memory at a time: `quantize_function` and
        `quantize_model` plan from shapes alone.

        Args:
          path: of the array, or of the subtree: "layers/0".
          tree: floating arrays; what the rules leave in float comes back as it is.

        Raises:
          UnknownName: the model has no such parameter; names the nearest.
          ShapeError: it has another shape there.
          ArgumentError: it holds NaN or infinities.
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
                    f"{full}: an array of shape {list(array.shape)}, where the model was planned with "
                    f"{list(planned[full].shape)}. Give it in that shape, or plan for the shapes that it has."
                )
            spec = self.treatment.specs.get(full)
            arrays[below] = array if spec is None else _parameter(self.treatment.method, array, spec, full)
        return part.with_arrays(arrays)


_ARRAY: Final = object()
"""Stands in the place of an array."""


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _is_fixed(fixed: Sequence[Any], identity: Any) -> bool:
    """Whether further calls are likely to have the same identity."""
    if any(isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in fixed):
        return False
    try:
        hash(identity)
    except TypeError:
        return False
    return True


class State(NamedTuple):
    """What a quantized model holds beside its parameters.

    Attributes:
      ranges: the static ranges of activations, by site.
      key: what its gradients are rounded at random with, by methods that do so; None rounds them to the nearest.
      factors: those of its adapters, by the path of the parameter.
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
      name: of the method.
      stream: calls over which static ranges are measured.
      may_quantize: whether the array at a path is a parameter at all.

    Returns:
      All arrays by path, the static ranges by site, and how to run programs with them.
    """
    chosen = method(name)
    chosen.check(rules)
    given = parameters.arrays
    parameters = Parameters.of(parameters.with_arrays({path: _floats(array) for path, array in given.items()}))
    program = trace(fn, parameters, *args, **kwargs)
    before = parameters.arrays
    seen = program.survey(before, Treatment(tuple(rules), chosen))
    shapes = {
        path: array.shape
        for path, array in before.items()
        if may_quantize(path) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    planned = plan(
        rules, shapes, [use for use in seen.uses if use.path in shapes], [row.op for row in seen.rows], seen.stops
    )
    after = {path: _parameter(chosen, before[path], spec, path) for path, spec in planned.specs.items()}
    after = {path: after.get(path, array) for path, array in before.items()}
    treatment = Treatment(tuple(rules), chosen, planned.of_path, planned.specs, planned.tiles)
    listed = [_row(path, given[path], after[path], planned) for path in shapes]
    seen = program.survey(after, treatment)
    _check_trained(treatment, seen.rows)
    names = site_names(seen.sites)
    sites = {names[key]: site for key, site in seen.sites.items()}
    ranges = static_ranges(fn, parameters, treatment, sites, stream)
    return after, ranges, Quantization(treatment, coverage.report(name, rules, listed, seen.rows))


def _check_trained(treatment: Treatment, rows: Sequence[OpRow]) -> None:
    """Raises an error if a rule is for products that the method does not train, and for no others."""
    if treatment.method.products is None:
        return
    for number, rule in enumerate(treatment.rules):
        mine = [row for row in rows if row.rule == number]
        if rule.optional or not mine or (rule.weights, rule.activations) == (None, None):
            continue
        if all(row.computed == "float" for row in mine):
            reasons = "; ".join(dict.fromkeys(f"{row.op}: {row.reason}" for row in mine))
            raise RuleError(
                f"Rule {number}, {rule}: method {treatment.method.name!r} quantizes none of the operations that it is "
                f"for. {reasons}. Use method 'qat', give it other parameters, or mark it optional=True."
            )


def unquantized() -> Quantization:
    """How programs of a model are run that no rule quantizes."""
    return Quantization(Treatment((), method("ptq")), coverage.report("ptq", (), (), ()))


def _floats(array: Any) -> Any:
    """The floats that a quantized parameter stands for, which are quantized anew; any other as it is."""
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
    return ParameterRow(
        path, number, before.shape, after.scheme, after.scale.shape, size, stored, note=planned.note(path)
    )
